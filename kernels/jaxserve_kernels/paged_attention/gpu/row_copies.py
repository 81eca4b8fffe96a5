"""Asynchronous copies of rows whose length is no power of two into shared memory (`cp.async`), by all threads of a warpgroup.

Mosaic's own copies want a number of tiles that four warps can share. Here eight neighbouring threads copy 16 bytes of each of eight
rows, so that neither they nor `ldmatrix` have bank conflicts.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm

_BYTES = 16
"""Bytes that a thread copies at a time."""
_ROWS = 8
_THREADS, _WARP = 128, 32


def swizzle(width: int) -> int:
    """Return the swizzle of rows of so many bytes: tiles are as wide."""
    return 2 * _BYTES if width % (2 * _BYTES) == 0 else _BYTES


def start(source: Any, target: Any, transforms: tuple[Any, ...]) -> None:
    """Start a copy of rows of device memory, a group of its own. target: rows of tiles, perhaps the first columns of wider ones."""
    rows, dim = source.shape
    itemsize = jnp.dtype(source.dtype).itemsize
    across = dim * itemsize // _BYTES
    num_pieces = rows * across
    tile_width = swizzle(dim * itemsize)
    tile_pieces = tile_width // _BYTES

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms)))  # type: ignore[untyped-decorator]
    def copy(_: Any, source: Any, target: Any) -> None:
        strides, _ = ir.MemRefType(target.type).get_strides_and_offset()
        origin = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(source))
        thread = arith.index_cast(_number(0).type, gpu.thread_id(gpu.Dimension.x))

        def piece(first: int) -> None:
            index = arith.minui(arith.addi(thread, _number(first)), _number(num_pieces - 1))
            row, tile = arith.remui(index, _number(_ROWS)), arith.divui(index, _number(_ROWS))
            tile_row, column = arith.divui(tile, _number(across)), arith.remui(tile, _number(across))
            from_bytes = _sum((tile_row, _ROWS * dim * itemsize), (row, dim * itemsize), (column, _BYTES))
            tile_column, place = (step(column, _number(tile_pieces)) for step in (arith.divui, arith.remui))
            swizzled = arith.remui(arith.divui(row, _number(128 // tile_width)), _number(tile_pieces))
            in_tile = _sum((row, tile_width), (arith.xori(place, swizzled), _BYTES))
            to_bytes = _sum((tile_row, strides[0] * itemsize), (tile_column, strides[1] * itemsize), (in_tile, 1))
            nvvm.cp_async_shared_global(
                mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [to_bytes], _byte()),
                mgpu.utils.getelementptr(origin, [from_bytes], _byte()),
                _BYTES,
                nvvm.LoadCacheModifierKind.CG,
            )

        for first in range(0, num_pieces, _THREADS):
            warps = -(-(num_pieces - first) // _WARP)
            if warps >= _THREADS // _WARP:
                piece(first)
                continue
            # Threads after the last piece in the last of these warps copy it again.
            is_needed = arith.cmpi(arith.CmpIPredicate.ult, arith.divui(thread, _number(_WARP)), _number(warps))
            with mgpu.utils.when(is_needed):
                piece(first)
        nvvm.cp_async_commit_group()

    copy(source, target)


def _sum(*terms: tuple[Any, int]) -> Any:
    total = _number(0)
    for number, factor in terms:
        total = arith.addi(total, arith.muli(number, _number(factor)))
    return total


def _number(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _byte() -> Any:
    return ir.IntegerType.get_signless(8)
