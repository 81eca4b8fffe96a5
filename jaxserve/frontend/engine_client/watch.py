"""Watches the messages of one engine: notices a start without progress, and an engine that has become silent.

Time is measured in several looks. A pause of this process itself, in which it heard nothing, is at most one of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from jaxserve.ipc.messages import FromEngine, StartupProgress

STALL_LOOKS: Final = 8
"""Number of checks that find an engine silent before it counts as dead: a pause of this process itself proves nothing."""


class EngineWatch:
    """The signs of life and of progress of one engine."""

    def __init__(self, stall_timeout_s: float, startup_timeout_s: float) -> None:
        """stall_timeout_s: silence after which a busy engine is unhealthy; after twice as long any engine is dead.

        startup_timeout_s: longest time without progress before the engine is ready. 0 for either: no limit.
        """
        self._stall_timeout_s = stall_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._last_message_s = self._busy_since_s = time.monotonic()
        self._num_messages = 0
        self._num_advances = 0
        self._phases: dict[str, StartupProgress] = {}
        self._latest: StartupProgress | None = None

    def note(self, message: FromEngine) -> None:
        """Take a message of the engine as a sign of life, and a new line of a start-up phase as progress."""
        self._last_message_s = time.monotonic()
        self._num_messages += 1
        if isinstance(message, StartupProgress) and self._phases.get(message.phase) != message:
            self._phases[message.phase] = self._latest = message
            self._num_advances += 1

    def note_work(self) -> None:
        """Note that the engine has got work, and had none before."""
        self._busy_since_s = time.monotonic()

    def ailment(self) -> str | None:
        """Return the reason why a busy engine is not healthy; None if it is."""
        silent_s = time.monotonic() - max(self._last_message_s, self._busy_since_s)
        if 0 < self._stall_timeout_s < silent_s:
            return f"the engine has work and has been silent for more than {self._stall_timeout_s:g} s"
        return None

    async def wait_silent(self) -> str:
        """Wait until a ready engine was silent for twice the time that makes it unhealthy, and return that in words.

        An engine sends a message every second.
        """
        patience_s = 2 * self._stall_timeout_s
        await _wait_unchanged(lambda: self._num_messages, patience_s)
        return f"the engine has been silent for more than {patience_s:g} s"

    async def wait_stuck(self) -> str:
        """Wait until a starting engine has made no progress for the time that it may take, and return that in words."""
        await _wait_unchanged(lambda: self._num_advances, self._startup_timeout_s)
        latest = self._latest
        place = "" if latest is None else f" after {latest.done} of {latest.total} of phase {latest.phase!r}"
        return f"the start of the engine made no progress for {self._startup_timeout_s:g} s{place} (--startup-timeout)"


async def _wait_unchanged(count: Callable[[], int], patience_s: float) -> None:
    """Wait until `count` has not changed for `patience_s`; for ever if that is 0."""
    if not patience_s:
        await asyncio.Event().wait()
    num_equal = 0
    while num_equal < STALL_LOOKS:
        last = count()
        await asyncio.sleep(patience_s / STALL_LOOKS)
        num_equal = num_equal + 1 if count() == last else 0
