"""The plan of a launch of either kernel: tiles of rows, units of work, and the workers that compute them.

A tile is so many rows of one expert. A unit of work is a tile times a block of outputs times a part of the inputs; a
persistent grid takes them one after the other, the blocks of a tile side by side. A program has two workers (compute
warpgroups, each with outputs of its own) and one warpgroup that fetches for both, through a ring of shared memory.

An expert's rows begin anywhere, but shared memory is laid out in blocks of 8 rows: its first tile begins at the
multiple of 8 before them. How inputs are parted depends on shapes alone, so a row's result depends on itself.

Letters: R rows, E experts, I inputs, O outputs, Q tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxserve_kernels.grouped_matmul.gpu import WORKERS
from jaxserve_kernels.grouped_matmul.tiles import Tiles
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning

ALIGNMENT = 8
"""Alignment of a tile's first row: shared memory is laid out in tiles of 8 rows."""
_FEW = 16
_FETCHER = WORKERS
_WORK_REGISTERS, _FETCH_REGISTERS = 232, 40
"""Per thread: 2 x 128 x 232 + 128 x 40 are just below the 65,536 of a multiprocessor."""


class Unit(NamedTuple):
    """Rows of one tile, a block of outputs, and the steps [first, last) along the inputs."""

    tile: Any
    expert: Any
    start: Any
    begin: Any
    end: Any
    block: Any
    split: Any
    first: Any
    last: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """Compile-time parameters of one launch."""

    num_inputs: int
    num_outputs: int
    steps: int
    """Along the inputs, of a unit at most."""
    tuning: GroupedTuning

    @property
    def block(self) -> int:
        """Outputs of a unit."""
        return WORKERS * self.tuning.outputs

    @property
    def num_blocks(self) -> int:
        return pl.cdiv(self.num_outputs, self.block)

    @property
    def is_divided(self) -> bool:
        """True if blocks divide the outputs; else the last block begins early, with outputs of the one before."""
        return self.num_outputs % self.block == 0

    def first_output(self, block: Any) -> Any:
        """The first output of a block."""
        return block * self.block if self.is_divided else jnp.minimum(block * self.block, self.num_outputs - self.block)

    @property
    def splits(self) -> int:
        """Parts of the inputs."""
        return pl.cdiv(self.num_inputs // self.tuning.inputs, self.steps)

    def unit(self, index: Any, tiles: Tiles) -> Unit:
        """The unit of a number."""
        tile, part = jax.lax.div(index, jnp.int32(self.num_blocks * self.splits)), jnp.int32(self.splits)
        block = jax.lax.rem(jax.lax.div(index, part), jnp.int32(self.num_blocks))
        split = jax.lax.rem(index, part)
        first = split * self.steps
        last = jnp.minimum(first + self.steps, self.num_inputs // self.tuning.inputs)
        start = pl.multiple_of(tiles.starts[tile], ALIGNMENT)
        return Unit(tile, tiles.experts[tile], start, tiles.begins[tile], tiles.ends[tile], block, split, first, last)

    def run(
        self, tiles: Tiles, work: Callable[[Any, Unit, Any], None], fetch: Callable[[Unit, Any], None], free: Any
    ) -> None:
        """A program's share of the units.

        work(worker, unit, done), fetch(unit, done): `done` counts the steps of the units before. free: the barriers at
        which the workers give back what was fetched.
        """
        warpgroup, program, programs = (
            jax.lax.axis_index("warpgroup"),
            jax.lax.axis_index("program"),
            self.tuning.programs,
        )
        num_units = tiles.num_tiles[0] * (self.num_blocks * self.splits)
        rounds = jax.lax.div(num_units - program + (programs - 1), jnp.int32(programs))

        def each(do: Callable[[Unit, Any], None]) -> Any:
            def one(turn: Any, done: Any) -> Any:
                unit = self.unit(turn * programs + program, tiles)
                do(unit, done)
                return done + (unit.last - unit.first)

            return jax.lax.fori_loop(0, rounds, one, jnp.int32(0))

        @pl.when(warpgroup < WORKERS)
        def _() -> None:
            plgpu.set_max_registers(_WORK_REGISTERS, action="increase")
            each(lambda unit, done: work(warpgroup, unit, done))

        @pl.when(warpgroup == _FETCHER)
        def _() -> None:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")
            self._drain(each(fetch), free)

    def _drain(self, done: Any, free: Any) -> None:
        """Wait for every arrival before the barriers go."""

        def one(i: Any, _: None) -> None:
            plgpu.barrier_wait(free.at[jax.lax.rem(i, jnp.int32(self.tuning.stages))])

        jax.lax.fori_loop(jnp.maximum(done - self.tuning.stages, 0), done, one, None)

    def fill(self, unit: Unit, done: Any, free: Any, copy: Callable[[Any, Any], None]) -> None:
        """Start a unit's copies: copy(step, slot), each into a slot of the ring as soon as it is free."""
        stages = self.tuning.stages

        def one(step: Any, _: None) -> None:
            taken = done + step - unit.first
            slot = jax.lax.rem(taken, jnp.int32(stages))

            @pl.when(taken >= stages)
            def wait() -> None:
                plgpu.barrier_wait(free.at[slot])

            copy(step, slot)

        jax.lax.fori_loop(unit.first, unit.last, one, None)

    def copy_rows(self, unit: Unit, x: Any, target: Any, ready: Any) -> None:
        """Start the copy of a unit's rows; of a tile with few that are its own no more are read."""
        most, is_small = self.tuning.rows, unit.end - unit.start <= _FEW
        for rows, is_wanted in ((_FEW, is_small), (most, ~is_small)) if most > _FEW else ((most, True),):

            @pl.when(is_wanted)
            def _(rows: int = rows) -> None:
                plgpu.copy_gmem_to_smem(x.at[pl.ds(unit.start, rows)], target.at[pl.ds(0, rows)], ready)


def make_plan(x: tuple[int, ...], weight: tuple[int, ...], tuning: GroupedTuning) -> Plan:
    """For operands of these shapes; units are so small that every multiprocessor has one, if each row has an expert of
    its own."""
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x, weight
    units = min(num_rows, num_experts) * pl.cdiv(num_outputs, WORKERS * tuning.outputs)
    steps = pl.cdiv(num_inputs // tuning.inputs, max(1, tuning.programs // units))
    return Plan(num_inputs, num_outputs, steps, tuning)
