"""One reply, from its first piece to its end, however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.tools.client.replies import Piece
from jaxserve.tools.terminal.screen import Screen


@dataclass(slots=True)
class Reply:
    """What has come so far. Times are `time.perf_counter()` seconds."""

    asked_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float = 0.0
    text: str = ""
    num_pieces: int = 0
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    is_stopped: bool = False
    """By Ctrl-C."""

    def add(self, piece: Piece) -> None:
        if piece.text or piece.reasoning:
            self.first_s = self.first_s or piece.arrived_s
            self.last_s = piece.arrived_s
            self.num_pieces += 1
            self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage

    def summary(self) -> str:
        """Tokens and speed in one line; without the server's counts, pieces are counted."""
        num_prompt, num_output = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        num_cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        parts = []
        if num_prompt is not None:
            parts.append(f"prompt {num_prompt} tokens" + (f" ({num_cached} cached)" if num_cached else ""))
        reply = f"reply {self.num_pieces} pieces" if num_output is None else f"reply {num_output} tokens"
        if self.first_s is not None:
            seconds = self.last_s - self.asked_s
            rate = (self.num_pieces if num_output is None else num_output) / max(seconds, 1e-6)
            reply += f" in {seconds:.2f} s ({rate:.1f} a second, the first after {self.first_s - self.asked_s:.2f} s)"
        parts.append(reply)
        parts.append("stopped" if self.is_stopped else f"ended by {self.finish_reason}")
        return ", ".join(parts)


def receive(runner: asyncio.Runner, pieces: AsyncIterator[Piece], screen: Screen) -> Reply:
    """Show the pieces until they end or Ctrl-C ends them. Raises RemoteError, the line on screen being ended."""
    reply = Reply()

    async def listen() -> None:
        async for piece in pieces:
            reply.add(piece)
            screen.show(piece)

    try:
        runner.run(listen())
    except KeyboardInterrupt:
        reply.is_stopped = True
    finally:
        screen.end()
    return reply
