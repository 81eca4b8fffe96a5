"""Matmuls of few tokens with 8- and 4-bit weights for Hopper: the weights are read once, and upcast in registers.

Activations of the weights' own 8-bit type are multiplied with them as they are. Sums of e4m3 by e4m3, of which the tensor cores keep some
14 bits, are theirs for the inputs of one tile, and are added up in float32 (decision 0118).

The result is computed transposed, `out.T = W @ x.T`: outputs, of which there are many, fill the 64 rows that a matmul
of the tensor cores has; tokens are its columns, as few as 8. A program has two or four workers (compute warpgroups, each with
outputs of its own) and one warpgroup that fetches tiles of weights and activations for all of them.

Programs share the tiles as `stream` says; XLA adds the parts, and applies the scales.

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
from jaxtyping import Array, Float, Num

from jaxserve_kernels import upcast, words
from jaxserve_kernels.hopper import stored, tiled, widened
from jaxserve_kernels.matmul.gpu.stream import Stream
from jaxserve_kernels.matmul.reference import quantize_rows
from jaxserve_kernels.matmul.tuning import SkinnyTuning

_TOKENS = 8
"""Columns of a matmul come in eights, those of int8 by int8 in sixteens where they are more than 32."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    stream: Stream
    is_emulated: bool
    """True if the interpreter runs it."""
    is_upcast: bool
    """True if weights are upcast in words, and the inputs of each tile of x permuted for that."""
    blocks_of_tile: int
    """Blocks of e2m1 weights in a tile's inputs, whose scales weights are multiplied with; 0: weights have no blocks."""

    @property
    def tile_columns(self) -> int:
        """Columns of stored weights in a tile's inputs: a byte has two e2m1 numbers."""
        tile = self.stream.tuning.tile
        return tile // 2 if self.blocks_of_tile else tile


def scaled_matmul(
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
    stream = Stream(padded.shape[0], weight.shape[0], num_inputs // tuning.tile, tuning)
    kernel = _Kernel(stream, is_emulated, is_upcast, blocks)
    return stream.joined(_launch(kernel, padded, weight, *scales))[:num_tokens].astype(jnp.float32)


def _launch(
    kernel: _Kernel, x: Num[Array, "T I"], weight: Num[Array, "O _"], *scales: Float[Array, "G O"]
) -> Num[Array, "X O T"]:
    """scales: of groups, which are tiles, or of blocks within them."""
    stream, tuned = kernel.stream, kernel.stream.tuning
    scratch = {
        "x_ring": tiled((tuned.stages, stream.num_tokens, tuned.tile), x.dtype),
        "w_ring": tiled((tuned.stages, tuned.block, kernel.tile_columns), weight.dtype),
        "ready": plgpu.Barrier(num_arrivals=2 + len(scales), num_barriers=tuned.stages),
        "free": plgpu.Barrier(num_arrivals=tuned.workers, num_barriers=tuned.stages),
    }
    if kernel.blocks_of_tile:
        shape = tuned.stages, kernel.blocks_of_tile, tuned.block
        scratch["b_ring"] = tiled(shape, scales[0].dtype, columns=tuned.rows)
    elif scales:
        scratch["s_ring"] = plgpu.SMEM((tuned.stages, tuned.block), scales[0].dtype)
    if kernel.is_emulated and x.dtype != weight.dtype:
        scratch["wide"] = tiled((tuned.workers, tuned.rows, tuned.tile), x.dtype)

    def body(*refs: Any, **scratch_refs: Any) -> None:
        *operands, out = refs
        stream.run(
            out,
            scratch_refs["free"],
            lambda worker, start, stop: _multiply(kernel, worker, start, stop, out.dtype, scratch_refs),
            lambda block, step, slot: _copy(kernel, operands, scratch_refs, block, step, slot),
        )

    return stream.launch(body, (x, weight, *scales), scratch, jnp.int32 if x.dtype == jnp.int8 else jnp.float32)


def _multiply(kernel: _Kernel, worker: Any, start: Any, stop: Any, dtype: Any, scratch: dict[str, Any]) -> Array:
    """Return a worker's matmul of the tiles [start, stop) of a block."""
    stream, tuned = kernel.stream, kernel.stream.tuning
    rows, shape = pl.ds(worker * tuned.rows, tuned.rows), (tuned.rows, stream.num_tokens)
    factor = words.factor(scratch["w_ring"].dtype, jnp.bfloat16) if kernel.is_upcast else 1

    def multiply_tile(slot: Any, accumulator: Any) -> None:
        x_tile, w_tile = scratch["x_ring"].at[slot], scratch["w_ring"].at[slot, rows]
        if kernel.blocks_of_tile:
            s_tile = scratch["b_ring"].at[slot, :, rows]
            if kernel.is_upcast:
                w_tile = upcast.upcast_blocks(w_tile, s_tile)
            else:
                w_tile = stored(upcast.dequantized_blocks(w_tile, s_tile, x_tile.dtype), scratch["wide"].at[worker])
        elif kernel.is_upcast:
            w_tile = upcast.upcast(w_tile)
        elif w_tile.dtype != x_tile.dtype:
            wide = widened(w_tile, x_tile.dtype)
            w_tile = wide if not kernel.is_emulated else stored(wide, scratch["wide"].at[worker])
        plgpu.wgmma(accumulator, w_tile, x_tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)

    def add_apart(tile: Any, total: Array) -> Array:
        """The matmul of one tile, scaled if it is a group's, on top of the others."""
        slot = stream.slot_of(tile)

        def multiply(accumulator: Any) -> Array:
            multiply_tile(slot, accumulator)
            return accumulator[...]

        plgpu.barrier_wait(scratch["ready"].at[slot])
        scales = None
        if "s_ring" in scratch:
            by_row = plgpu.Layout.WGMMA.reduce(1)
            scales = plgpu.load(scratch["s_ring"].at[slot, rows], layout=by_row).astype(dtype) * factor
        result = pl.run_scoped(multiply, plgpu.ACC(shape, dtype))
        plgpu.barrier_arrive(scratch["free"].at[slot])
        return total + (result if scales is None else result * jax.lax.broadcast_in_dim(scales, result.shape, (0,)))

    def add_tile(tile: Any, accumulator: Any) -> None:
        slot = stream.slot_of(tile)
        plgpu.barrier_wait(scratch["ready"].at[slot])
        multiply_tile(slot, accumulator)
        plgpu.barrier_arrive(scratch["free"].at[slot])

    def multiply(accumulator: Any) -> Array:
        jax.lax.fori_loop(start, stop, lambda tile, _: add_tile(tile, accumulator), None)
        return accumulator[...]

    if "s_ring" in scratch or scratch["x_ring"].dtype == jnp.float8_e4m3fn:
        zeros = plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)
        total: Array = jax.lax.fori_loop(start, stop, add_apart, zeros)
    else:
        total = pl.run_scoped(multiply, plgpu.ACC(shape, dtype)) * factor
    return total


def _copy(kernel: _Kernel, operands: list[Any], scratch: dict[str, Any], block: Any, step: Any, slot: Any) -> None:
    """Start the copies of a tile of activations and weights, and of its scales."""
    (x, weight, *scales), tuned = operands, kernel.stream.tuning
    columns, blocks, ready = kernel.tile_columns, kernel.blocks_of_tile, scratch["ready"].at[slot]
    outputs = pl.ds(block * tuned.block, tuned.block)
    own = weight.at[outputs, pl.ds(step * columns, columns)]
    plgpu.copy_gmem_to_smem(own, scratch["w_ring"].at[slot], ready)
    plgpu.copy_gmem_to_smem(x.at[:, pl.ds(step * tuned.tile, tuned.tile)], scratch["x_ring"].at[slot], ready)
    for each in scales:
        place = (pl.ds(step * blocks, blocks), outputs) if blocks else (step, outputs)
        plgpu.copy_gmem_to_smem(each.at[place], scratch["b_ring" if blocks else "s_ring"].at[slot], ready)
