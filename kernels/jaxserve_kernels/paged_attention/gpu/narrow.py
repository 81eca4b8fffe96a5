"""Tiles of 8-bit keys and values as operands of `mma.sync`, upcast in registers (see `words`).

`ldmatrix` moves numbers of 16 bits, and transposes no smaller ones before compute capability 10.0: it is given pairs of neighbouring numbers of
a head as one number. A thread then has four neighbouring numbers of a key, and a pair of each of two neighbouring keys'
values. Pairs that are upcast are half a word apart. So the numbers of a head come in another order, sixteen by sixteen: as inputs
of the matmul with keys, for which queries are put into the same order, and as rows of the results.

Letters: X keys of a tile, H head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.mma import MMALayouts
from jaxlib.mlir import ir
from jaxtyping import Array, Float

from jaxserve_kernels import words


def as_inputs(queries: Float[Array, "*s H"]) -> Float[Array, "*s H"]:
    """Return queries with the numbers of each head in the order of `keys`."""
    parted = queries.reshape(*queries.shape[:-1], -1, 4, 2, 2)
    return parted.swapaxes(-2, -1).swapaxes(-3, -2).reshape(queries.shape)


def results_layout() -> Any:
    """Return the layout of results in the order of the head."""
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((64, 8), (16, 8), (2, 8), (2,))), warp_dims=(-7,), lane_dims=(-5, -2), vector_dim=-1
    )


def in_order(results: jax.Array) -> jax.Array:
    """Return results [H, C], whose rows are in the order of `values`, in the order of the head: other names of the same registers."""
    layout = results_layout()
    mlir_layout = layout.to_mgpu()

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.MMA_ACC(results.dtype),),
        return_type=plgpu.ShapeDtypeStruct(results.shape, results.dtype, layout=layout),
    )  # type: ignore[untyped-decorator]
    def name_anew(_: Any, results: Any) -> Any:
        registers = results.registers.reshape(mlir_layout.registers_shape(results.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=mlir_layout, _is_signed=None)

    ordered: jax.Array = name_anew(results)
    return ordered


def keys(tile: Any, swizzle: int, transforms: tuple[Any, ...], dtype: Any) -> jax.Array:
    """Return a tile [X, H] in shared memory as the left operand [X, H], inputs in an order of their own, without the factor of `words`."""
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(((64, 8), (16, 8), (8, 8), (2,))),
        warp_dims=(-7,),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    )
    return _load(tile, swizzle, transforms, dtype, layout, is_transposed=False)


def values(tile: Any, swizzle: int, transforms: tuple[Any, ...], dtype: Any) -> jax.Array:
    """Return a tile [X, H] in shared memory as the left operand [H, X], rows in an order of their own, without the factor of `words`."""
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(((32, 16), (8, 8), (2,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    )
    return _load(tile, swizzle, transforms, dtype, layout, is_transposed=True)


def _load(
    tile: Any, swizzle: int, transforms: tuple[Any, ...], dtype: Any, layout: Any, *, is_transposed: bool
) -> jax.Array:
    """Load pairs of numbers in a layout that has two registers for every four of the operand, and upcast them."""
    shape = tile.shape[::-1] if is_transposed else tile.shape
    operand, narrow = MMALayouts(dtype).lhs, tile.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms),),
        return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.MMA_LHS(dtype)),
    )  # type: ignore[untyped-decorator]
    def load(_: Any, tile: Any) -> Any:
        paired = _as_pairs(tile)
        if is_transposed:
            paired = mgpu.utils.memref_transpose(paired, (1, 0, 3, 2))
        loaded = mgpu.FragmentedArray.load_tiled(paired, swizzle, is_signed=False, layout=layout.canonicalize())
        upcast = [pair for register in loaded.registers.flat for pair in words.pairs(register, narrow, dtype)]
        # Keys: two rows by two halves of the inputs; values: two halves of the inputs by two rows.
        quads = np.array([*upcast, None], object)[:-1].reshape(-1, 2, 2)
        registers = (quads if is_transposed else quads.swapaxes(1, 2)).reshape(operand.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=operand, _is_signed=None)

    wide: jax.Array = load(tile)
    return wide


def _as_pairs(tile: Any) -> Any:
    """Return a tiled reference to bytes as one to half as many numbers of 16 bits."""
    shape = ir.MemRefType(tile.type).shape
    kind = ir.MemRefType.get(
        (*shape[:-1], shape[-1] // 2), ir.IntegerType.get_signless(16), memory_space=mgpu.utils.smem()
    )
    return mgpu.utils.ptr_as_memref(mgpu.utils.memref_ptr(tile), kind)
