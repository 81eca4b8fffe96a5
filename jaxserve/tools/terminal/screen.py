"""Writes a reply as it arrives. Reasoning and remarks are dim on a terminal, and omitted elsewhere."""

from __future__ import annotations

from typing import TextIO

from jaxserve.tools.client import OutputDelta

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_UNPRINTABLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters, with which a reply could move the cursor or rename the window."""


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
