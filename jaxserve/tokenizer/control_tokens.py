"""Control tokens (special added tokens, such as `<|im_end|>`) and their texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class ControlTokens:
    """Control tokens of a vocabulary."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        """texts: by token id."""
        self._texts = dict(texts)
        self._ids = {text: token_id for token_id, text in texts.items()}
        self.ids = frozenset(texts)
        # A control token of one character cannot be broken in two.
        breakable = sorted((text for text in texts.values() if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, breakable))) if breakable else None

    def in_texts(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of control tokens whose text occurs in any of `texts`."""
        return frozenset(token_id for token_id, token in self._texts.items() if any(token in text for text in texts))

    def include(self, texts: Iterable[str]) -> bool:
        """Return True if every one of `texts` is a control token."""
        return self._ids.keys() >= set(texts)

    def split(self, text: str) -> tuple[str | int, ...]:
        """Return the text with the ids of its control tokens in their places."""
        if self._pattern is None:
            return (text,) if text else ()
        parts: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            parts += [text[end : match.start()], self._ids[match[0]]]
            end = match.end()
        return tuple(part for part in (*parts, text[end:]) if part != "")

    def broken(self, value: Any, mark: str) -> Any:
        """Return JSON data with `mark` after the first character of every control token in its strings."""
        pattern = self._pattern
        if pattern is None:
            return value
        if isinstance(value, str):
            while pattern.search(value):
                value = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {self.broken(key, mark): self.broken(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item, mark) for item in value]
        return value
