"""Runs plans of texts on the devices: owns parameters, executables and, for a decoder, the pages of one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.layers.attention import KVPool
from jaxserve.runner.embed_inputs import pack_texts
from jaxserve.runner.inputs import Program
from jaxserve.scheduler.embed_plan import EmbedPlan, EmbedResult

EmbedExecutable = Callable[
    [tuple[jax.Array, ...], KVPool | None, np.ndarray],
    tuple[KVPool | None, jax.Array],
]
"""Parameters, pages (DONATED) and the packed plan; gives back pages and the texts' vectors."""


@dataclass(frozen=True, slots=True)
class PendingVectors:
    """A dispatched step whose vectors are on their way to the host."""

    runner: EmbedRunner
    vectors: jax.Array
    num_texts: int
    started: float

    def is_done(self) -> bool:
        return bool(self.vectors.is_ready())  # type: ignore[attr-defined]

    def result(self) -> EmbedResult:
        """Wait for the device."""
        try:
            vectors = np.asarray(self.vectors)[: self.num_texts]
        except Exception:
            self.runner.renew()
            raise
        return EmbedResult(vectors, self.runner.seconds_since(self.started))


class EmbedRunner:
    """Calls executables directly, so that a shape nobody compiled is an error and never a compilation."""

    def __init__(
        self,
        params: tuple[jax.Array, ...],
        new_pool: Callable[[], KVPool | None],
        page_size: int,
        executables: Mapping[Program, EmbedExecutable],
    ) -> None:
        self._params = params
        self._new_pool = new_pool
        self._pool = new_pool()
        self._page_size = page_size
        self._executables = {program.num_tokens: (program, compiled) for program, compiled in executables.items()}
        self._last_read = 0.0

    def submit(self, plan: EmbedPlan) -> PendingVectors:
        """Dispatch one step; the pages pass from this step to the next, which finds nothing in them that it needs."""
        program, executable = self._executables[plan.bucket]
        packed = pack_texts(plan, program, self._page_size)
        started = time.monotonic()
        try:
            self._pool, vectors = executable(self._params, self._pool, packed)
        except Exception:
            self.renew()
            raise
        vectors.copy_to_host_async()
        return PendingVectors(self, vectors, len(plan.request_ids), started)

    def seconds_since(self, started: float) -> float:
        """How long a step that is over took: from its dispatch, or from the end of the one before it."""
        now = time.monotonic()
        seconds = now - max(started, self._last_read)
        self._last_read = now
        return seconds

    def renew(self) -> None:
        """Fresh pages in place of those that a failed step has left."""
        self._pool = self._new_pool()
