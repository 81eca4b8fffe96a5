"""The messages of a chat."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

Message = dict[str, str]
"""`{"role": "user", "content": "..."}`."""


@dataclass(slots=True)
class Conversation:
    """A system prompt and turns of question and answer; the last answer may be missing."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """Messages of the next request."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Remove the last question with its answer, if any; returns the question."""
        while self.turns:
            message = self.turns.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def save(self, path: Path, model: str) -> None:
        """Write the fields of a request that continues the conversation. Raises OSError."""
        text = json.dumps({"model": model, "messages": self.messages}, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
