"""Runs step plans on the devices: owns parameters, KV pool and executables."""

from __future__ import annotations

import time
from collections.abc import Mapping
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

    packed: jax.Array
    program: Program
    num_rows: int
    started: float

    def result(self) -> StepResult:
        """Wait for the device and unpack."""
        packed = np.asarray(self.packed)
        return unpack_result(packed, self.program, self.num_rows, time.monotonic() - self.started)


def make_pool(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> KVPool:
    """Two zeroed arrays `[L, P, K, S, H]`: zeroed, because a masked NaN would still poison a sum."""
    return KVPool(
        k=jnp.zeros(shape, dtype, device=sharding.kv_pool), v=jnp.zeros(shape, dtype, device=sharding.kv_pool)
    )


class Runner:
    """Calls executables directly, so that a shape nobody compiled is an error and never a compilation."""

    def __init__(
        self, params: tuple[jax.Array, ...], pool: KVPool, executables: Mapping[Program, jax.stages.Compiled]
    ) -> None:
        self._params = params
        self._pool = pool
        self._executables = {
            (program.kind, program.num_tokens): (program, compiled) for program, compiled in executables.items()
        }

    def submit(self, plan: StepPlan) -> PendingStep:
        """Dispatch one step; the pool's buffers pass from this step to the next."""
        program, executable = self._executables[plan.kind, plan.bucket]
        packed = pack(plan, program)
        started = time.monotonic()
        k, v, result = executable(self._params, self._pool.k, self._pool.v, packed)
        self._pool = KVPool(k, v)
        result.copy_to_host_async()
        return PendingStep(result, program, len(plan.request_ids), started)
