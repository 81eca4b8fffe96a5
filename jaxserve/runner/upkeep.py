"""What the device keeps from step to step, and the small programs that make it and write to it between steps.

They are made before the first request like the steps' own, and cached like them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels import native
from jaxserve_kernels.backend import NATIVE, Backend

from jaxserve.layers.attention import KVPool
from jaxserve.runner.slots import MASKS_AT_ONCE, mask_rows, slot_row
from jaxserve.scheduler.plan import Mask, SlotInit


@dataclass(frozen=True, slots=True)
class Keeping:
    """The shapes of all that is kept."""

    pool_shape: tuple[int, ...]
    kv_dtype: jnp.dtype
    num_slots: int
    vocab_size: int
    backend: Backend = "reference"
    """Where it is native, the pool's memory is provided as it is touched, and from `Keeper.provide` on."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """A program on what is kept: a zeroed pool or empty slots, a request's row, the masks of some rows."""

    kind: Literal["pool", "slots", "init_slot", "masks"]
    keeping: Keeping

    @property
    def name(self) -> str:
        return f"between steps/{self.kind}"


def upkeep_programs(keeping: Keeping) -> tuple[Upkeep, ...]:
    """All of them."""
    return tuple(Upkeep(kind, keeping) for kind in ("pool", "slots", "init_slot", "masks"))


class Keeper:
    """Makes and writes what is kept, by executables."""

    def __init__(self, keeping: Keeping, executables: Mapping[Upkeep, jax.stages.Compiled]) -> None:
        self._keeping = keeping
        self._call = {program.kind: compiled for program, compiled in executables.items()}

    def new_pool(self) -> KVPool:
        """Two zeroed arrays `[L, P, K, S, H]`: zeroed, because a masked NaN would still poison a sum."""
        return KVPool(*jax.block_until_ready(self._call["pool"]()))

    def provide(self, pool: KVPool) -> None:
        """Have the system provide all of the pool's memory in the background, where it has not yet."""
        if self._keeping.backend in NATIVE:
            for half in pool:
                native.provide(half)

    def new_slots(self) -> jax.Array:
        """Empty slots."""
        return self._call["slots"]()  # type: ignore[no-any-return]

    def init_slot(self, slots: jax.Array, init: SlotInit) -> jax.Array:
        """The slots with this request in its own; its row crosses to the device. DONATES slots."""
        row = slot_row(init, self._keeping.vocab_size)
        return self._call["init_slot"](slots, np.int32(init.slot), row)  # type: ignore[no-any-return]

    def mask(self, slots: jax.Array, masks: Sequence[Mask]) -> jax.Array:
        """The slots with these masks, whose bits cross to the device. DONATES slots."""
        for start in range(0, len(masks), MASKS_AT_ONCE):
            some = masks[start : start + MASKS_AT_ONCE]
            slots = self._call["masks"](slots, *mask_rows(some, self._keeping.num_slots, self._keeping.vocab_size))
        return slots
