"""Float32 numbers as operands of `mma.sync`: each is a sum of two in bfloat16, and a matmul is three.

A right operand is made by XLA in blocks of 32 x 32 numbers, in the order in which threads hold them. So a thread reads 16 bytes at a
time, straight into the registers of the instruction, without shared memory. A left operand is the sum of an earlier matmul: the thread that
has a number of the sum is the one that needs it.

Left operands and sums have the 64 columns of a program as rows, 16 for each of its four warps.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.mma import MMALayouts
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Float

from jaxserve_kernels.linear_attention.gpu import COLUMNS

BLOCK: Final = 32
"""Inputs and outputs of a block."""
_TILES, _LANES, _NUMBERS = 4, 32, 8
"""Tiles of eight outputs of a block, each with this many numbers of every thread of a warp."""
SUM: Final = plgpu.Layout.MMA_ACC(jnp.float32)
_LEFT: Final = plgpu.Layout.MMA_LHS(jnp.bfloat16)
_RIGHT: Final = plgpu.Layout.MMA_RHS(jnp.bfloat16)
_STORED: Final = plgpu.Layout.TILED(
    fragmented_array.Tiling(((_LANES, _NUMBERS),)),
    warp_dims=(fragmented_array.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""A block as it is stored: every warp reads all of it."""
_COLUMNS_LAST: Final = plgpu.Layout.TILED(
    fragmented_array.Tiling(((8, COLUMNS), (8, 16), (2, 8), (1,))), warp_dims=(-6,), lane_dims=(-2, -5), vector_dim=-1
)
"""A sum with its columns last, as states, values and outputs lie in memory."""


class Parts(NamedTuple):
    """A matrix as the sum of two in bfloat16, exact but for 2**-17 of each number."""

    high: Any
    low: Any


def blocks(x: Float[Array, "*s I O"]) -> BFloat16[Array, "*s IB OB 2 128 8"]:
    """Return right operands of I inputs and O outputs, multiples of BLOCK, by blocks and parts."""
    *outer, num_inputs, num_outputs = x.shape
    by_block = num_inputs // BLOCK, num_outputs // BLOCK
    # A register has two neighbouring inputs, the next one those eight inputs ahead; two such pairs are sixteen inputs.
    cut = x.reshape(-1, by_block[0], 2, 2, 4, 2, by_block[1], _TILES, 8)
    ordered = cut.transpose(0, 1, 6, 7, 8, 4, 2, 3, 5).reshape(*outer, *by_block, _TILES * _LANES, _NUMBERS)
    # XLA may leave out a conversion to bfloat16 and back, which would leave nothing of the lower part.
    high = jax.lax.reduce_precision(ordered, exponent_bits=8, mantissa_bits=7)
    return jnp.stack([high, ordered - high], -3).astype(jnp.bfloat16)


def load_block(ref: Any) -> Parts:
    """Return a right operand [BLOCK, BLOCK] of device memory. ref: [2, 128, 8], see `blocks`."""
    return Parts(*(_as_right(plgpu.load(ref.at[part], layout=_STORED, optimized=False)) for part in range(2)))


def load_sum(ref: Any) -> Array:
    """Return float32 numbers [BLOCK, COLUMNS] of memory as a sum [COLUMNS, BLOCK]."""
    found: Array = _renamed(plgpu.load(ref, layout=_COLUMNS_LAST, optimized=False), _COLUMNS_LAST, SUM, _joined)
    return found


def columns_last(total: Array) -> Array:
    """Return a sum [COLUMNS, BLOCK] as an array [BLOCK, COLUMNS], to be stored."""
    return _renamed(total, SUM, _COLUMNS_LAST, _parted)


def empty() -> Array:
    """Return a sum [COLUMNS, BLOCK] of nothing."""
    found: Array = plgpu.layout_cast(jnp.zeros((COLUMNS, BLOCK), jnp.float32), SUM)
    return found


def as_left(total: Array) -> Parts:
    """Return a sum [COLUMNS, BLOCK] as a left operand."""
    high = total.astype(jnp.bfloat16)
    low = (total - _upcast(high)).astype(jnp.bfloat16)
    return Parts(_as_left(high), _as_left(low))


def add_matmul(total: Array, left: Parts, right: Parts) -> Array:
    """Return total + left @ right, the small products first."""
    for a, b in ((left.low, right.high), (left.high, right.low), (left.high, right.high)):
        total = plgpu.mma(total, a, b)
    return total


def _upcast(part: Array) -> Array:
    """Return a sum's bfloat16 numbers in float32, from the words that have two of them: the compiler would make them one by one."""

    @plgpu.inline_mgpu(arg_types=(SUM,), return_type=plgpu.ShapeDtypeStruct(part.shape, jnp.float32, layout=SUM))  # type: ignore[untyped-decorator]
    def upcast(_: Any, part: Any) -> Any:
        registers = _objects([_wide(pair) for pair in part.registers.flat])
        return _fragmented(registers, part.layout, part.shape)

    found: Array = upcast(part)
    return found


def _wide(pair: Any) -> Any:
    word = ir.IntegerType.get_signless(32)
    bits = mgpu.utils.bitcast(pair, word)
    halves = arith.shli(bits, mgpu.utils.c(16, word)), arith.andi(bits, mgpu.utils.c(0xFFFF0000 - (1 << 32), word))
    single = ir.VectorType.get((1,), ir.F32Type.get())
    return mgpu.utils.vector_concat([mgpu.utils.bitcast(half, single) for half in halves])


def _as_left(part: Array) -> Array:
    left = MMALayouts(jnp.bfloat16).lhs

    @plgpu.inline_mgpu(
        arg_types=(SUM,),
        return_type=plgpu.ShapeDtypeStruct(part.shape, part.dtype, layout=_LEFT),
    )  # type: ignore[untyped-decorator]
    def rename(_: Any, part: Any) -> Any:
        return _fragmented(part.registers, left, part.shape)

    found: Array = rename(part)
    return found


def _as_right(stored: Array) -> Array:
    right = MMALayouts(jnp.bfloat16).rhs

    @plgpu.inline_mgpu(
        arg_types=(_STORED,),
        return_type=plgpu.ShapeDtypeStruct((BLOCK, BLOCK), stored.dtype, layout=_RIGHT),
    )  # type: ignore[untyped-decorator]
    def rename(_: Any, stored: Any) -> Any:
        # Of each tile of outputs four registers: two inputs each, of 16 inputs two.
        pairs = [
            mgpu.utils.vector_slice(tile, slice(first, first + 2))
            for tile in stored.registers.flat
            for first in range(0, _NUMBERS, 2)
        ]
        by_inputs = _objects(pairs).reshape(_TILES, 2, 2).swapaxes(0, 1)
        return _fragmented(by_inputs, right, (BLOCK, BLOCK))

    found: Array = rename(stored)
    return found


def _renamed(x: Array, old: Any, new: Any, change: Any) -> Array:
    """Return the transpose of an array: other names of the same numbers of each thread."""
    shape, layout = x.shape[::-1], new.to_mgpu()

    @plgpu.inline_mgpu(arg_types=(old,), return_type=plgpu.ShapeDtypeStruct(shape, x.dtype, layout=new))  # type: ignore[untyped-decorator]
    def rename(_: Any, x: Any) -> Any:
        return _fragmented(change(x.registers), layout, shape)

    found: Array = rename(x)
    return found


def _joined(registers: Any) -> Any:
    """Return registers of two neighbouring rows each of an array with columns last."""
    return _objects([mgpu.utils.vector_concat(list(pair)) for pair in registers.reshape(-1, 2)])


def _parted(registers: Any) -> Any:
    """Undo `_joined`."""
    return _objects([mgpu.utils.vector_slice(pair, slice(i, i + 1)) for pair in registers.flat for i in range(2)])


def _objects(values: list[Any]) -> Any:
    """Return MLIR values as an array of one dimension. (numpy would look into them.)"""
    return np.array([*values, None], object)[:-1]


def _fragmented(registers: Any, layout: Any, shape: tuple[int, ...]) -> Any:
    registers = registers.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
