"""Matmuls of few tokens with 8- and 4-bit weights for Hopper: the weights are read once, and upcast in registers.

Activations of the weights' own 8-bit type are multiplied with them as they are.

The result is computed transposed, `out.T = W @ x.T`: outputs, of which there are many, fill the 64 rows that a product
of the tensor cores has; tokens are its columns, as few as 8. A program has two or four workers (compute warpgroups, each with
outputs of its own) and one warpgroup that fetches tiles of weights and activations for all of them.

The tiles of all outputs, one after the other, are cut into equal shares, one per program (stream-K, arXiv 2301.03598):
every multiprocessor has as much to read, whatever the shape. A share may begin and end inside of the outputs' row of
tiles; XLA adds the parts, and applies the scales.

Letters: T tokens, I inputs, O outputs, X parts of a row of tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from jaxserve_kernels import mxfp4, upcast, words
from jaxserve_kernels.hopper import stored, tiled, widened
from jaxserve_kernels.matmul.reference import quantize_rows
from jaxserve_kernels.matmul.tuning import SkinnyTuning

REGISTERS = {2: (232, 40), 4: (112, 32)}
"""Per thread of a worker and of the fetcher, by workers: all that the program's threads begin with (168 and 96 each)."""
_HARDLY_LARGER = 1.1
_TOKENS = 8
"""Columns of a product come in eights, those of int8 by int8 in sixteens where they are more than 32."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Static facts of one launch. Tiles are counted along the inputs, then along the outputs."""

    num_tokens: int
    num_inputs: int
    num_outputs: int
    tuning: SkinnyTuning
    is_emulated: bool
    """True if the interpreter runs it."""
    is_upcast: bool
    """True if weights are upcast in words, and the inputs of each tile of x permuted for that."""
    blocks_of_tile: int
    """Blocks of e2m1 weights in a tile's inputs, whose scales weights are multiplied with; 0: weights have no blocks."""

    @property
    def tile_columns(self) -> int:
        """Columns of stored weights in a tile's inputs: a byte has two e2m1 numbers."""
        return self.tuning.tile // 2 if self.blocks_of_tile else self.tuning.tile

    @property
    def block(self) -> int:
        """Outputs of a program at a time."""
        return self.tuning.block

    @property
    def num_blocks(self) -> int:
        return self.num_outputs // self.block

    @property
    def tiles_per_block(self) -> int:
        return self.num_inputs // self.tuning.tile

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


def product(
    x: Float[Array, "T I"],
    weight: Num[Array, "O I"],
    scales: Float[Array, "O"],
    *,
    dynamic: bool,
    tuning: SkinnyTuning,
    is_emulated: bool = False,
) -> Float[Array, "T O"]:
    """See `api.matmul`."""
    if not dynamic:
        return matmul(x, weight, tuning=tuning, is_emulated=is_emulated) * scales
    values, row_scales = quantize_rows(x, weight.dtype)
    return matmul(values, weight, tuning=tuning, is_emulated=is_emulated) * row_scales[:, None] * scales


@functools.partial(jax.jit, static_argnames=("tuning", "is_emulated"))
def matmul(
    x: Num[Array, "T I"],
    weight: Num[Array, "O _"],
    *scales: Float[Array, "G O"],
    tuning: SkinnyTuning,
    is_emulated: bool = False,
) -> Float[Array, "T O"]:
    """x @ weight.T of the numbers that both are stored as. Shapes: see `gpu.supports`.

    scales: of groups of as many inputs as a tile has, if the weights belong to such; they are then multiplied with. Weights of uint8
    are two e2m1 numbers each, and scales those of their blocks, of which a tile has some.
    """
    num_tokens, num_inputs = x.shape
    multiple = 2 * _TOKENS if x.dtype == jnp.int8 and num_tokens > 4 * _TOKENS else _TOKENS
    padded = jnp.pad(x, ((0, -num_tokens % multiple), (0, 0)))
    is_upcast = not is_emulated and upcast.is_supported(x.dtype, weight.dtype)
    if is_upcast:
        padded = upcast.permuted(padded, weight.dtype, tuning.tile)
    blocks = scales[0].shape[0] * tuning.tile // num_inputs if weight.dtype == jnp.uint8 else 0
    kernel = _Kernel(padded.shape[0], num_inputs, weight.shape[0], tuning, is_emulated, is_upcast, blocks)
    parts = _launch(kernel, padded, weight, *scales)
    is_written = np.arange(len(parts))[:, None] < kernel.num_parts  # (X, blocks)
    by_block = parts.reshape(*is_written.shape, kernel.block, -1)
    total = jnp.where(is_written[..., None, None], by_block, 0).sum(0)
    return total.reshape(kernel.num_outputs, -1)[:, :num_tokens].T.astype(jnp.float32)


def _launch(
    kernel: _Kernel, x: Num[Array, "T I"], weight: Num[Array, "O _"], *scales: Float[Array, "G O"]
) -> Num[Array, "X O T"]:
    """Parts that a block does not have stay unwritten. scales: of groups, which are tiles, or of blocks within them."""
    tuned = kernel.tuning
    scratch = {
        "x_ring": tiled((tuned.stages, kernel.num_tokens, tuned.tile), x.dtype),
        "w_ring": tiled((tuned.stages, kernel.block, kernel.tile_columns), weight.dtype),
        "ready": plgpu.Barrier(num_arrivals=2 + len(scales), num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=tuned.workers, num_barriers=tuned.stages),
    }
    if kernel.blocks_of_tile:
        scratch["b_ring"] = tiled(
            (tuned.stages, kernel.blocks_of_tile, kernel.block), scales[0].dtype, columns=tuned.rows
        )
    elif scales:
        scratch["s_ring"] = plgpu.SMEM((tuned.stages, kernel.block), scales[0].dtype)
    if kernel.is_emulated and x.dtype != weight.dtype:
        scratch["wide"] = tiled((tuned.workers, tuned.rows, tuned.tile), x.dtype)
    parts = (int(kernel.num_parts.max()), kernel.num_outputs, kernel.num_tokens)
    launch = plgpu.kernel(
        lambda *refs, **scratch_refs: _body(kernel, refs[:-1], refs[-1], scratch_refs),
        out_type=jax.ShapeDtypeStruct(parts, jnp.int32 if x.dtype == jnp.int8 else jnp.float32),
        grid=(pl.cdiv(kernel.num_tiles, kernel.share),),
        grid_names=("program",),
        num_threads=tuned.workers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
    )
    return launch(x, weight, *scales)


def _body(kernel: _Kernel, operands: tuple[Any, ...], out: Any, scratch: dict[str, Any]) -> None:
    warpgroup, workers = jax.lax.axis_index("warpgroup"), kernel.tuning.workers
    work_registers, fetch_registers = REGISTERS[workers]
    first = jax.lax.axis_index("program") * kernel.share
    end = jnp.minimum(first + kernel.share, kernel.num_tiles)

    @pl.when(warpgroup < workers)
    def _() -> None:
        plgpu.set_max_registers(work_registers, action="increase")
        _work(kernel, warpgroup, first, end, out, scratch)

    @pl.when(warpgroup == workers)
    def _() -> None:
        plgpu.set_max_registers(fetch_registers, action="decrease")
        _fetch(kernel, first, end, operands, scratch)


def _work(kernel: _Kernel, worker: Any, first: Any, end: Any, out: Any, scratch: dict[str, Any]) -> None:
    """Tiles [first, end), block by block."""
    tuned, per_block = kernel.tuning, jnp.int32(kernel.tiles_per_block)
    rows = pl.ds(worker * tuned.rows, tuned.rows)
    factor = words.factor(scratch["w_ring"].dtype, jnp.bfloat16) if kernel.is_upcast else 1

    def slot_of(tile: Any) -> Any:
        return jax.lax.rem(tile - first, jnp.int32(tuned.stages))

    def multiply_tile(tile: Any, accumulator: Any) -> None:
        slot = slot_of(tile)
        x_tile, w_tile = scratch["x_ring"].at[slot], scratch["w_ring"].at[slot, rows]
        if kernel.blocks_of_tile:
            s_tile = scratch["b_ring"].at[slot, :, rows]
            if kernel.is_upcast:
                w_tile = upcast.upcast_blocks(w_tile, s_tile)
            else:
                w_tile = stored(_dequantized(w_tile, s_tile, x_tile.dtype), scratch["wide"].at[worker])
        elif kernel.is_upcast:
            w_tile = upcast.upcast(w_tile)
        elif w_tile.dtype != x_tile.dtype:
            wide = widened(w_tile, x_tile.dtype)
            w_tile = wide if not kernel.is_emulated else stored(wide, scratch["wide"].at[worker])
        plgpu.wgmma(accumulator, w_tile, x_tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)

    def add_group(tile: Any, total: Array) -> Array:
        """The product of one group's tile, scaled, on top of the others."""

        def multiply(accumulator: Any) -> Array:
            multiply_tile(tile, accumulator)
            return accumulator[...]

        plgpu.barrier_wait(scratch["ready"].at[slot_of(tile)])
        by_row = plgpu.Layout.WGMMA.reduce(1)
        scales = plgpu.load(scratch["s_ring"].at[slot_of(tile), rows], layout=by_row).astype(out.dtype) * factor
        product = pl.run_scoped(multiply, plgpu.ACC((tuned.rows, kernel.num_tokens), out.dtype))
        plgpu.barrier_arrive(scratch["free"].at[slot_of(tile)])
        return total + product * jax.lax.broadcast_in_dim(scales, product.shape, (0,))

    def multiply_block(block: Any, _: None) -> None:
        start, stop = jnp.maximum(first, block * per_block), jnp.minimum(end, (block + 1) * per_block)

        def add_tile(tile: Any, accumulator: Any) -> None:
            plgpu.barrier_wait(scratch["ready"].at[slot_of(tile)])
            multiply_tile(tile, accumulator)
            plgpu.barrier_arrive(scratch["free"].at[slot_of(tile)])

        def multiply(accumulator: Any) -> Array:
            jax.lax.fori_loop(start, stop, lambda tile, _: add_tile(tile, accumulator), None)
            return accumulator[...]

        part = jax.lax.axis_index("program") - jax.lax.div(block * per_block, jnp.int32(kernel.share))
        outputs = pl.ds(block * kernel.block + worker * tuned.rows, tuned.rows)
        shape = (tuned.rows, kernel.num_tokens)
        if "s_ring" in scratch:
            zeros = plgpu.layout_cast(jnp.zeros(shape, out.dtype), plgpu.Layout.WGMMA)
            total = jax.lax.fori_loop(start, stop, add_group, zeros)
        else:
            total = pl.run_scoped(multiply, plgpu.ACC(shape, out.dtype)) * factor
        out.at[part, outputs][...] = total

    jax.lax.fori_loop(jax.lax.div(first, per_block), jax.lax.div(end - 1, per_block) + 1, multiply_block, None)


def _fetch(kernel: _Kernel, first: Any, end: Any, operands: tuple[Any, ...], scratch: dict[str, Any]) -> None:
    """Keep the ring full, across the borders of blocks."""
    x, weight, *scales = operands
    stages, per_block, size = jnp.int32(kernel.tuning.stages), jnp.int32(kernel.tiles_per_block), kernel.tuning.tile

    def fetch(tile: Any, _: None) -> None:
        slot = jax.lax.rem(tile - first, stages)

        @pl.when(tile - first >= stages)
        def wait() -> None:
            plgpu.barrier_wait(scratch["free"].at[slot])

        outputs = pl.ds(jax.lax.div(tile, per_block) * kernel.block, kernel.block)
        ready = scratch["ready"].at[slot]
        step, columns, blocks = jax.lax.rem(tile, per_block), kernel.tile_columns, kernel.blocks_of_tile
        own = weight.at[outputs, pl.ds(step * columns, columns)]
        plgpu.copy_gmem_to_smem(own, scratch["w_ring"].at[slot], ready)
        plgpu.copy_gmem_to_smem(x.at[:, pl.ds(step * size, size)], scratch["x_ring"].at[slot], ready)
        for each in scales:
            place = (pl.ds(step * blocks, blocks), outputs) if blocks else (step, outputs)
            plgpu.copy_gmem_to_smem(each.at[place], scratch["b_ring" if blocks else "s_ring"].at[slot], ready)

    jax.lax.fori_loop(first, end, fetch, None)

    def drain(tile: Any, _: None) -> None:  # every arrival is waited for before the barriers go
        plgpu.barrier_wait(scratch["free"].at[jax.lax.rem(tile - first, stages)])

    jax.lax.fori_loop(jnp.maximum(end - stages, first), end, drain, None)


def _dequantized(tile: Any, scales: Any, dtype: Any) -> Array:
    """Return e2m1 weights of two numbers a byte times the scales of their blocks `[G, O]`, for the interpreter."""
    numbers = mxfp4.numbers_at(mxfp4.places_of(tile[...]))
    by_output = scales[...].astype(jnp.float32).T
    wide: Array = (numbers.reshape(*by_output.shape, -1) * by_output[:, :, None]).reshape(numbers.shape)
    return wide.astype(dtype)
