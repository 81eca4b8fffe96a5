"""Equal shares of a matrix for programs that stream it (stream-K, arXiv 2301.03598).

The tiles of all outputs, one after the other, are cut into equal shares, one per program: every multiprocessor has as much
to read, whatever the shape. A share may begin and end inside of the outputs' row of tiles; XLA adds the parts. A program has two or
four workers (compute warpgroups, each with outputs of its own) and one warpgroup that fetches tiles for all of them.

Letters: T tokens, O outputs, X parts of a row of tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from jaxserve_kernels.matmul.tuning import SkinnyTuning

REGISTERS = {2: (232, 40), 4: (112, 32)}
"""Per thread of a worker and of the fetcher, by workers: all that the program's threads begin with (168 and 96 each)."""
_HARDLY_LARGER = 1.1


@dataclass(frozen=True, slots=True)
class Stream:
    """Compile-time parameters of one launch. Tiles are counted along the inputs, then along the outputs."""

    num_tokens: int
    num_outputs: int
    tiles_per_block: int
    tuning: SkinnyTuning

    @property
    def block(self) -> int:
        """Outputs of a program at a time."""
        return self.tuning.block

    @property
    def num_blocks(self) -> int:
        return self.num_outputs // self.block

    @property
    def num_tiles(self) -> int:
        return self.num_blocks * self.tiles_per_block

    @property
    def share(self) -> int:
        """Tiles of a program: whole blocks where that makes the largest share hardly larger."""
        least = pl.cdiv(self.num_tiles, self.tuning.programs)
        whole = pl.cdiv(self.num_blocks, self.tuning.programs) * self.tiles_per_block
        return whole if whole < _HARDLY_LARGER * least else least

    @property
    def num_parts(self) -> np.ndarray:
        """Return for each block the programs with a share in it."""
        first = np.arange(self.num_blocks) * self.tiles_per_block
        parts: np.ndarray = (first + self.tiles_per_block - 1) // self.share - first // self.share + 1
        return parts

    def launch(
        self, body: Callable[..., None], operands: tuple[Array, ...], scratch: dict[str, Any], dtype: Any
    ) -> Num[Array, "X O T"]:
        """Run a body on the operands' references, the result's, and scratch. Parts that a block does not have stay unwritten."""
        launch = plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((int(self.num_parts.max()), self.num_outputs, self.num_tokens), dtype),
            grid=(pl.cdiv(self.num_tiles, self.share),),
            grid_names=("program",),
            num_threads=self.tuning.workers + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
        )
        parts: Array = launch(*operands)
        return parts

    def joined(self, parts: Num[Array, "X O T"]) -> Num[Array, "T O"]:
        """Add the parts that are written, and transpose."""
        is_written = np.arange(len(parts))[:, None] < self.num_parts  # (X, blocks)
        by_block = parts.reshape(*is_written.shape, self.block, -1)
        total: Array = jnp.where(is_written[..., None, None], by_block, 0).sum(0)
        return total.reshape(self.num_outputs, -1).T

    def slot_of(self, tile: Any) -> Any:
        """Return the slot of the ring that one of this program's tiles has."""
        return jax.lax.rem(tile - self._first(), jnp.int32(self.tuning.stages))

    def run(
        self,
        out: Any,
        free: Any,
        multiply: Callable[[Any, Any, Any], Any],
        copy: Callable[[Any, Any, Any], None],
    ) -> None:
        """Divide the work of a program among its warpgroups.

        multiply(worker, start, stop): return a worker's matmul of the tiles [start, stop), which are of one block.
        copy(block, step, slot): start the copies of a tile, `step` along the inputs, into a slot of the ring, which `free` guards.
        """
        warpgroup, workers = jax.lax.axis_index("warpgroup"), self.tuning.workers
        work_registers, fetch_registers = REGISTERS[workers]

        @pl.when(warpgroup < workers)
        def work() -> None:
            plgpu.set_max_registers(work_registers, action="increase")
            self._work(warpgroup, out, multiply)

        @pl.when(warpgroup == workers)
        def fetch() -> None:
            plgpu.set_max_registers(fetch_registers, action="decrease")
            self._fetch(free, copy)

    def _first(self) -> Any:
        return jax.lax.axis_index("program") * self.share

    def _end(self) -> Any:
        return jnp.minimum(self._first() + self.share, self.num_tiles)

    def _work(self, worker: Any, out: Any, multiply: Callable[[Any, Any, Any], Any]) -> None:
        first, end, rows = self._first(), self._end(), self.tuning.rows
        per_block = jnp.int32(self.tiles_per_block)

        def multiply_block(block: Any, _: None) -> None:
            start, stop = jnp.maximum(first, block * per_block), jnp.minimum(end, (block + 1) * per_block)
            part = jax.lax.axis_index("program") - jax.lax.div(block * per_block, jnp.int32(self.share))
            outputs = pl.ds(block * self.block + worker * rows, rows)
            out.at[part, outputs][...] = multiply(worker, start, stop)

        jax.lax.fori_loop(jax.lax.div(first, per_block), jax.lax.div(end - 1, per_block) + 1, multiply_block, None)

    def _fetch(self, free: Any, copy: Callable[[Any, Any, Any], None]) -> None:
        """Keep the ring full, across the borders of blocks."""
        first, end = self._first(), self._end()
        stages, per_block = jnp.int32(self.tuning.stages), jnp.int32(self.tiles_per_block)

        def fetch(tile: Any, _: None) -> None:
            slot = self.slot_of(tile)

            @pl.when(tile - first >= stages)
            def wait() -> None:
                plgpu.barrier_wait(free.at[slot])

            copy(jax.lax.div(tile, per_block), jax.lax.rem(tile, per_block), slot)

        jax.lax.fori_loop(first, end, fetch, None)

        def drain(tile: Any, _: None) -> None:  # every arrival is waited for before the barriers go
            plgpu.barrier_wait(free.at[self.slot_of(tile)])

        jax.lax.fori_loop(jnp.maximum(end - stages, first), end, drain, None)
