"""State on the devices: the KV pool and the slots, and the programs that create and update them between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels import native
from jaxserve_kernels.backend import NATIVE, Backend
from jaxtyping import Array, Int

from jaxserve.layers.attention import KVPool
from jaxserve.runner.slots import MASKS_AT_ONCE, mask_rows, slot_row
from jaxserve.sampling.params import SlotInit
from jaxserve.scheduler.plan import Mask


class StateArrays(NamedTuple):
    """Arrays that every step takes (DONATED) and returns in the same buffers."""

    pool: KVPool | None
    """None for an encoder."""
    slots: Int[Array, "X1 S"] | None
    """None where a step samples nothing."""


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Shapes of the state of one engine."""

    pool_shape: tuple[int, ...] | None
    """`[L, P, K, S, H]`; None for an encoder."""
    kv_dtype: jnp.dtype
    num_slots: int
    """0 where a step samples nothing."""
    vocab_size: int
    backend: Backend = "reference"
    """Native backends have the system provide the pool's memory from `DeviceState.provide_memory` on."""


@dataclass(frozen=True, slots=True)
class StateProgram:
    """A program that creates the pool or the slots, or writes a request's row or some masks."""

    kind: Literal["pool", "slots", "init_slot", "masks"]
    shapes: StateShapes

    @property
    def name(self) -> str:
        return f"state/{self.kind}"


def state_programs(shapes: StateShapes) -> tuple[StateProgram, ...]:
    """Return every state program that an engine with these shapes needs."""
    kinds: list[Literal["pool", "slots", "init_slot", "masks"]] = []
    kinds += ["pool"] if shapes.pool_shape is not None else []
    kinds += ["slots", "init_slot", "masks"] if shapes.num_slots else []
    return tuple(StateProgram(kind, shapes) for kind in kinds)


class DeviceState:
    """The state arrays of one engine. Steps replace `arrays`; the executables of state programs update them between steps."""

    def __init__(self, shapes: StateShapes, executables: Mapping[StateProgram, jax.stages.Compiled]) -> None:
        self._shapes = shapes
        self._call = {program.kind: compiled for program, compiled in executables.items()}
        self.arrays = self._new_arrays()

    def _new_arrays(self) -> StateArrays:
        """Zeroed, because a masked NaN in the pool would still poison a sum."""
        pool = KVPool(*jax.block_until_ready(self._call["pool"]())) if "pool" in self._call else None
        return StateArrays(pool, self._call["slots"]() if "slots" in self._call else None)

    def provide_memory(self) -> None:
        """Have the system provide all memory of the pool in the background; returns at once."""
        if self._shapes.backend in NATIVE:
            for half in self.arrays.pool or ():
                native.provide(half)

    def init_slots(self, inits: Sequence[SlotInit], masks: Sequence[Mask]) -> None:
        """Write the rows of requests that take their slots, then the token masks of some slots."""
        pool, slots = self.arrays
        for init in inits:
            slots = self._call["init_slot"](slots, np.int32(init.slot), slot_row(init, self._shapes.vocab_size))
            self.arrays = StateArrays(pool, slots)
        for start in range(0, len(masks), MASKS_AT_ONCE):
            rows = mask_rows(masks[start : start + MASKS_AT_ONCE], self._shapes.num_slots, self._shapes.vocab_size)
            slots = self._call["masks"](slots, *rows)
            self.arrays = StateArrays(pool, slots)

    def renew(self) -> None:
        """Replace the arrays by zeroed ones. The old ones go first: there is no memory for two pools."""
        with contextlib.suppress(Exception):  # waits for the steps that were dispatched after the failed one
            jax.block_until_ready(self.arrays.pool)
        for array in jax.tree.leaves(self.arrays):
            array.delete()
        self.arrays = self._new_arrays()
