"""Runs step plans on the devices: owns parameters, KV pool and executables.

A step that fails takes the pool with it: its buffers were donated, and what came back holds an error. The
next step starts from a zeroed pool. That loses nothing the scheduler still counts on: every running
request has a row in every step, so it failed with it, and cached pages are forgotten after a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.attention import KVPool
from jaxserve.runner.inputs import Program, pack, unpack_result
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.sharding.mesh import Sharding


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A dispatched step whose result is on its way to the host."""

    runner: Runner
    packed: jax.Array
    program: Program
    num_rows: int
    started: float

    def is_done(self) -> bool:
        return bool(self.packed.is_ready())  # type: ignore[attr-defined]

    def result(self) -> StepResult:
        """Wait for the device and unpack."""
        try:
            packed = np.asarray(self.packed)
        except Exception:
            self.runner.renew_pool()
            raise
        return unpack_result(packed, self.program, self.num_rows, time.monotonic() - self.started)


def make_pool(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> KVPool:
    """Two zeroed arrays `[L, P, K, S, H]`: zeroed, because a masked NaN would still poison a sum."""
    k, v = (jnp.zeros(shape, dtype, device=sharding.kv_pool).block_until_ready() for _ in range(2))
    return KVPool(k, v)


Executable = Callable[[tuple[jax.Array, ...], jax.Array, jax.Array, np.ndarray], tuple[jax.Array, jax.Array, jax.Array]]
"""Parameters, the two halves of the pool (DONATED) and the packed plan; gives the pool back and the packed result."""


class Runner:
    """Calls executables directly, so that a shape nobody compiled is an error and never a compilation."""

    def __init__(
        self,
        params: tuple[jax.Array, ...],
        new_pool: Callable[[], KVPool],
        executables: Mapping[Program, Executable],
    ) -> None:
        self._params = params
        self._new_pool = new_pool
        self._pool = new_pool()
        self._executables = {
            (program.kind, program.num_tokens): (program, compiled) for program, compiled in executables.items()
        }

    def submit(self, plan: StepPlan) -> PendingStep:
        """Dispatch one step; the pool's buffers pass from this step to the next."""
        program, executable = self._executables[plan.kind, plan.bucket]
        packed = pack(plan, program)
        started = time.monotonic()
        try:
            k, v, result = executable(self._params, self._pool.k, self._pool.v, packed)
        except Exception:
            self.renew_pool()
            raise
        self._pool = KVPool(k, v)
        result.copy_to_host_async()
        return PendingStep(self, result, program, len(plan.request_ids), started)

    def renew_pool(self) -> None:
        """A zeroed pool in place of one that a failed step has left. The old one goes first: there is no room for two."""
        for array in (self._pool.k, self._pool.v):
            array.delete()
        self._pool = self._new_pool()
