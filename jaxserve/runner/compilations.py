"""Counts backend compilations by phase: while serving there must be none."""

from __future__ import annotations

import logging
from typing import Literal

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_LOG = logging.getLogger(__name__)

Phase = Literal["warmup", "serving"]


class CompilationCounter:
    """Listens to JAX's own compile events from construction to `close`."""

    def __init__(self) -> None:
        self.phase: Phase = "warmup"
        self.counts: dict[str, int] = {"warmup": 0, "serving": 0}
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _COMPILE_EVENT:
            return
        self.counts[self.phase] += 1
        if self.phase == "serving":
            _LOG.error("a program was compiled while serving (%.2f s): this is a bug, please report it", duration_secs)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
