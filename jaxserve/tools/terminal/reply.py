"""Receives and shows one streamed reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.tools.client import OutputDelta
from jaxserve.tools.terminal.screen import Screen


@dataclass(slots=True)
class Reply:
    """The received part of a reply. Times are `time.perf_counter()` seconds."""

    asked_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    last_s: float = 0.0
    text: str = ""
    num_deltas: int = 0
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    is_stopped: bool = False
    """True if Ctrl-C ended the reply."""

    def add(self, delta: OutputDelta) -> None:
        if delta.text or delta.reasoning:
            self.first_s = self.first_s or delta.arrived_s
            self.last_s = delta.arrived_s
            self.num_deltas += 1
            self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage

    def summary(self) -> str:
        """Return tokens and speed in one line; without the server's token counts, the number of deltas."""
        num_prompt, num_output = self.usage.get("prompt_tokens"), self.usage.get("completion_tokens")
        num_cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        parts = []
        if num_prompt is not None:
            parts.append(f"prompt {num_prompt} tokens" + (f" ({num_cached} cached)" if num_cached else ""))
        reply = f"reply {self.num_deltas} pieces" if num_output is None else f"reply {num_output} tokens"
        if self.first_s is not None:
            seconds = self.last_s - self.asked_s
            rate = (self.num_deltas if num_output is None else num_output) / max(seconds, 1e-6)
            reply += f" in {seconds:.2f} s ({rate:.1f} a second, the first after {self.first_s - self.asked_s:.2f} s)"
        parts.append(reply)
        parts.append("stopped" if self.is_stopped else f"ended by {self.finish_reason}")
        return ", ".join(parts)


def receive(runner: asyncio.Runner, deltas: AsyncIterator[OutputDelta], screen: Screen) -> Reply:
    """Show the deltas until they end or Ctrl-C is pressed, and end the line. Raises RemoteError."""
    reply = Reply()

    async def listen() -> None:
        async for delta in deltas:
            reply.add(delta)
            screen.show(delta)

    try:
        runner.run(listen())
    except KeyboardInterrupt:
        reply.is_stopped = True
    finally:
        screen.end()
    return reply
