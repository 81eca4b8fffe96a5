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
from jaxserve.runner.page_tables import SentTables
from jaxserve.runner.slots import MASKS_AT_ONCE, mask_rows, slot_row
from jaxserve.sampling.params import SlotInit
from jaxserve.scheduler.plan import Mask, StepPlan


class StateArrays(NamedTuple):
    """Arrays that every step takes (DONATED) and returns in the same buffers."""

    pool: KVPool | None
    """None for an encoder."""
    slots: Int[Array, "X1 S"] | None
    """None where a step samples nothing."""
    tables: Int[Array, "X1 M"] | None = None
    """Page tables by slot; None where they come with every plan."""


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Shapes of the state of one engine."""

    pool_shape: tuple[int, ...] | None
    """`[L, P, K, S, H]`; None for an encoder."""
    kv_dtype: jnp.dtype
    num_slots: int
    """0 where a step samples nothing."""
    vocab_size: int
    max_pages: int = 0
    """Pages of a row of the page tables on the device; 0 where they come with every plan."""
    backend: Backend = "reference"
    """Native backends have the system provide the pool's memory from `DeviceState.provide_memory` on."""


StateKind = Literal["pool", "slots", "init_slot", "masks", "tables", "table_row"]


@dataclass(frozen=True, slots=True)
class StateProgram:
    """A program that creates the pool, the slots or the page tables, or writes a request's row or some masks."""

    kind: StateKind
    shapes: StateShapes

    @property
    def name(self) -> str:
        return f"state/{self.kind}"


def state_programs(shapes: StateShapes) -> tuple[StateProgram, ...]:
    """Return every state program that an engine with these shapes needs."""
    kinds: list[StateKind] = []
    kinds += ["pool"] if shapes.pool_shape is not None else []
    kinds += ["slots", "init_slot", "masks"] if shapes.num_slots else []
    kinds += ["tables", "table_row"] if shapes.max_pages else []
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
        shapes = self._shapes
        if shapes.max_pages:
            assert shapes.pool_shape is not None, "pages"
            self._sent = SentTables(shapes.num_slots, shapes.max_pages, shapes.pool_shape[3])
        return StateArrays(
            pool,
            self._call["slots"]() if "slots" in self._call else None,
            self._call["tables"]() if "tables" in self._call else None,
        )

    def provide_memory(self) -> None:
        """Have the system provide all memory of the pool in the background; returns at once."""
        if self._shapes.backend in NATIVE:
            for half in self.arrays.pool or ():
                native.provide(half)

    def init_slots(self, inits: Sequence[SlotInit], masks: Sequence[Mask]) -> None:
        """Write the rows of requests that take their slots, then the token masks of some slots."""
        slots = self.arrays.slots
        for init in inits:
            slots = self._call["init_slot"](slots, np.int32(init.slot), slot_row(init, self._shapes.vocab_size))
            self.arrays = self.arrays._replace(slots=slots)
        for start in range(0, len(masks), MASKS_AT_ONCE):
            rows = mask_rows(masks[start : start + MASKS_AT_ONCE], self._shapes.num_slots, self._shapes.vocab_size)
            slots = self._call["masks"](slots, *rows)
            self.arrays = self.arrays._replace(slots=slots)

    def send_tables(self, plan: StepPlan, places: np.ndarray, pages: np.ndarray) -> None:
        """Fill in the entries of page tables that `plan` changes; rows with too many of them are written at once.

        places, pages: fields of the step's packed plan, int32 `[T]`.
        """
        changes = self._sent.update(plan, len(places))
        count = len(changes.places)
        places[:count], pages[:count] = changes.places, changes.pages
        for slot, row in changes.whole_rows:
            tables = self._call["table_row"](self.arrays.tables, np.int32(slot), row)
            self.arrays = self.arrays._replace(tables=tables)

    def renew(self) -> None:
        """Replace the arrays by zeroed ones. The old ones go first: there is no memory for two pools."""
        with contextlib.suppress(Exception):  # waits for the steps that were dispatched after the failed one
            jax.block_until_ready(self.arrays.pool)
        for array in jax.tree.leaves(self.arrays):
            array.delete()
        self.arrays = self._new_arrays()
