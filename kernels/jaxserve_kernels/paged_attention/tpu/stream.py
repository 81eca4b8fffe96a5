"""Blocks of pages on their way from the pool into VMEM, one ahead of the block that is worked on.

The blocks of all units form one sequence, so that the first block of a unit travels while the unit before is worked
on. Block i lies in buffer i % 2. The ids of its pages are fetched one block earlier still, as one line of the table:
tables of long contexts are larger than SMEM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve_kernels.paged_attention.tpu.units import Scalar, Units

IDS_PER_LINE = 128
"""Page ids in one copy: a row of lanes. Pages per block divide it."""


@dataclass(frozen=True)
class Pool:
    """Keys and values of one layer, and the kv heads that a program works on."""

    arrays: tuple[Any, Any]  # HBM [L, P, K, S, H] each
    layer: Scalar
    first_head: Scalar
    num_heads: int

    def page(self, page_id: Scalar) -> list[Any]:
        """References to the keys and the values [K, S, H] of one page."""
        heads = pl.ds(self.first_head, self.num_heads)
        return [array.at[self.layer, page_id, heads] for array in self.arrays]


@dataclass(frozen=True)
class Stream:
    """References of one kernel, and what is done with them."""

    units: Units
    tables: Any  # HBM [B, lines, 1, 128]
    pool: Pool
    lines: Any  # SMEM [2, 1, 128]
    buffers: tuple[Any, Any]  # VMEM [2, C, K, S, H] each
    line_arrived: Any  # DMA semaphores [2]
    pages_arrived: Any

    @property
    def pages_per_block(self) -> int:
        return int(self.buffers[0].shape[1])

    @property
    def page_size(self) -> int:
        return int(self.buffers[0].shape[3])

    def blocks_of(self, unit: Scalar) -> tuple[Scalar, Scalar]:
        """Return the first block of a unit, and the end of its blocks."""
        keys = self.pages_per_block * self.page_size
        return self.units.first_keys[unit] // keys, pl.cdiv(self.units.end_keys[unit], keys)

    def pages_of(self, unit: Scalar, block: Scalar) -> tuple[Scalar, Scalar]:
        """Pages of a block that hold keys of the unit, counted from the block's first."""
        start = block * self.pages_per_block
        first = self.units.first_keys[unit] // self.page_size - start
        end = pl.cdiv(self.units.end_keys[unit], self.page_size) - start
        return jnp.maximum(first, 0), jnp.minimum(end, self.pages_per_block)

    def begin(self) -> None:
        """Start the first block. There is at least one unit."""
        unit, slot = jnp.int32(0), jnp.int32(0)
        block, _ = self.blocks_of(unit)
        self._line(unit, block, slot).start()
        self._start(unit, block, slot)

    def receive(self, unit: Scalar, block: Scalar, slot: Scalar) -> None:
        """Start the next block, then wait for this one, which lies in buffer `slot`."""
        following = self._following(unit, block)

        @pl.when(following[0] < self.units.num_units[0])
        def _() -> None:
            self._start(*following, 1 - slot)

        @pl.loop(*self.pages_of(unit, block))
        def _(page: Scalar) -> None:
            for copy in self._copies(jnp.int32(0), page, slot):
                copy.wait()

    def _following(self, unit: Scalar, block: Scalar) -> tuple[Scalar, Scalar]:
        next_unit = jnp.minimum(unit + 1, self.units.rows.shape[0] - 1)
        is_last = block + 1 >= self.blocks_of(unit)[1]
        return jnp.where(is_last, unit + 1, unit), jnp.where(is_last, self.blocks_of(next_unit)[0], block + 1)

    def _start(self, unit: Scalar, block: Scalar, slot: Scalar) -> None:
        """Start the copies of a block whose line is on its way, and the line of the next block."""
        self._line(unit, block, slot).wait()
        following = self._following(unit, block)

        @pl.when(following[0] < self.units.num_units[0])
        def _() -> None:
            self._line(*following, 1 - slot).start()

        first, end = self.pages_of(unit, block)
        place = (block * self.pages_per_block) % IDS_PER_LINE

        @pl.loop(first, end)
        def _(page: Scalar) -> None:
            for copy in self._copies(self.lines[slot, 0, place + page], page, slot):
                copy.start()

        def clear(page: Scalar) -> None:
            """A weight of exactly zero times what was never written may be NaN."""
            values = self.buffers[1]
            values[slot, page] = jnp.zeros(values.shape[2:], values.dtype)

        pl.loop(0, first)(clear)
        pl.loop(end, self.pages_per_block)(clear)

    def _line(self, unit: Scalar, block: Scalar, slot: Scalar) -> Any:
        line = (block * self.pages_per_block) // IDS_PER_LINE
        source = self.tables.at[self.units.rows[unit], line]
        return pltpu.make_async_copy(source, self.lines.at[slot], self.line_arrived.at[slot])

    def _copies(self, page_id: Scalar, page: Scalar, slot: Scalar) -> list[Any]:
        return [
            pltpu.make_async_copy(source, buffer.at[slot, page], self.pages_arrived.at[slot])
            for source, buffer in zip(self.pool.page(page_id), self.buffers, strict=True)
        ]
