"""Receives one streamed reply and writes it as it arrives.

Reasoning and remarks are dim on a terminal, and omitted elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from jaxserve.tools.client import OutputDelta

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, with which a reply could move the cursor or rename the window."""


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


class Screen:
    """One output, reply by reply: `show` its deltas, then `end` it."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._is_terminal = output.isatty()
        self._is_reasoning = False
        self._last = "\n"

    def show(self, delta: OutputDelta) -> None:
        """Write the text of a delta at once."""
        if delta.reasoning and self._is_terminal:
            if not self._is_reasoning:
                self._is_reasoning = True
                self._output.write(DIM)
            self._write(delta.reasoning)
        if delta.text:
            if self._is_reasoning:
                self._end_reasoning()
                self._output.write("\n" if self._last == "\n" else "\n\n")
            self._write(delta.text)

    def end(self) -> None:
        """End the reply's last line."""
        self._end_reasoning()
        if self._last != "\n":
            self._write("\n")

    def remark(self, text: str) -> None:
        """Write a line that is not part of the reply."""
        if self._is_terminal:
            self.end()
            self._output.write(f"{DIM}{text}{PLAIN}\n")
            self._output.flush()

    def leave_line(self) -> None:
        """End the line of a prompt without an answer, so that the shell's prompt begins a line."""
        if self._is_terminal:
            self._write("\n")

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            self._output.write(PLAIN)
            self._output.flush()

    def _write(self, text: str) -> None:
        text = text.translate(_UNPRINTABLE)
        self._output.write(text)
        self._output.flush()
        self._last = text[-1:] or self._last


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
