"""Upcast 8- and 4-bit weights to bfloat16 in words of 32 bits, for matmuls on Hopper.

A thread reads consecutive inputs of an output, up to 128 bits at once, and upcasts pairs of numbers that are half a word
apart. The tensor cores take other inputs from each thread, so activations have to be put into the order that results: a sum over inputs
is the same in any order.

Three facts about bfloat16 make numbers of bits: the bits of an integer below 256 are the number (subnormal, or just not) that is
2 ** -133 times as large; those of an e4m3 number, moved by four places, are the number that is 2 ** -120 times as large; those of an
e2m1 number, its last three moved by six places, the number that is 2 ** -126 times as large. All are multiplied by a power of two, which
is exact, e2m1 numbers by their block's e4m3 scale as well: the result has six digits. Weights and scales must not be NaN: e4m3's become 480.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Num

_LANES = 4
"""Threads that share an output's inputs."""
_LOAD_BITS = 128
"""Most bits that a thread reads at once."""
_INTEGER_EXPONENT, _E4M3_EXPONENT, _E2M1_EXPONENT = -133, -120, -126
_MOST_EXPONENT = 127
"""Largest exponent of a power of two in bfloat16: integers are upcast as 2 ** -6 of themselves."""
_SCALE_EXPONENT = 117
"""Exponent of what e4m3 scales are multiplied with: the largest scale, 448, stays finite."""
_E2M1_BITS = 0x81C0_81C0
"""Bits of a pair of bfloat16 numbers that e2m1 numbers have."""


def is_supported(dtype: Any, weight_dtype: Any) -> bool:
    """Return True if weights can be upcast in words for activations of `dtype`."""
    return dtype == jnp.bfloat16 and weight_dtype in (jnp.int4, jnp.uint8, jnp.int8, jnp.float8_e4m3fn)


def factor(weight_dtype: Any) -> float:
    """Return the power of two that the product with upcast weights has to be multiplied with."""
    if weight_dtype == jnp.uint8:
        return 2.0 ** -(_E2M1_EXPONENT + _SCALE_EXPONENT)
    return 1.0 if weight_dtype == jnp.float8_e4m3fn else 2.0 ** -(_INTEGER_EXPONENT + _MOST_EXPONENT)


def permuted(x: Num[Array, "T I"], weight_dtype: Any, tile: int) -> Num[Array, "T I"]:
    """Return activations with the inputs of each tile in the order of upcast weights; uint8 holds two e2m1 numbers."""
    word = 32 // _bits(weight_dtype)
    parted = x.reshape(len(x), -1, _LANES, tile // _LANES // word, 2, word // 2)
    return parted.transpose(0, 1, 3, 5, 2, 4).reshape(x.shape)


def upcast(tile: Any) -> jax.Array:
    """Return weights in shared memory as bfloat16 in registers, their inputs `permuted`, without the `factor`."""
    shape, pairs_of = tile.shape, _PAIRS[jnp.dtype(tile.dtype).name]
    layout = _by_words(shape[1], _bits(tile.dtype))

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )  # type: ignore[untyped-decorator]
    def convert(_: Any, packed: Any) -> Any:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        for block, half in np.ndindex(shape[0] // 64, 2):  # a thread has two rows of every 64
            loaded = packed.registers[block, 0, 0, 0, half].flat
            own = [pair for register in loaded for word in _words(register) for pair in pairs_of(word)]
            registers[block, :, 0, 0, half, 0, 0, 0, 0] = own
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    load: Any = plgpu.load  # its second argument is required in jax 0.10
    wide: jax.Array = convert(load(tile, layout=layout))
    return wide


def upcast_blocks(tile: Any, scales: Any) -> jax.Array:
    """Return e2m1 weights in shared memory, uint8 `[O, I / 2]`, times the e4m3 scales of their blocks `[G, O]`: see `upcast`."""
    (num_outputs, num_bytes), num_blocks = tile.shape, scales.shape[0]
    shape, words_of_block = (num_outputs, 2 * num_bytes), num_bytes // num_blocks // 4
    layouts = _by_words(num_bytes, 8), _by_blocks(num_blocks)

    @plgpu.inline_mgpu(
        arg_types=layouts,
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )  # type: ignore[untyped-decorator]
    def convert(_: Any, packed: Any, of_blocks: Any) -> Any:
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        for block, half in np.ndindex(shape[0] // 64, 2):  # a thread has two rows of every 64
            words = [word for each in packed.registers[block, 0, 0, 0, half].flat for word in _words(each)]
            steps = [_scale_pair(each) for each in of_blocks.registers[0, block, 0, 0, 0, half].flat]
            own = [pair for i, word in enumerate(words) for pair in _e2m1(word, steps[i // words_of_block])]
            registers[block, :, 0, 0, half, 0, 0, 0, 0] = own
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    load: Any = plgpu.load  # its second argument is required in jax 0.10
    wide: jax.Array = convert(load(tile, layout=layouts[0]), load(scales, layout=layouts[1]))
    return wide


def _bits(dtype: Any) -> int:
    return 4 if dtype in (jnp.int4, jnp.uint8) else 8


def _by_blocks(num_blocks: int) -> Any:
    """Return the layout of scales `[G, O]` that gives each thread those of its weights in the layout of `_by_words`."""
    own = num_blocks // _LANES
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((num_blocks, 64), (num_blocks, 16), (num_blocks, 8), (own, 1))),
        warp_dims=(-7,),
        lane_dims=(-3, -4),
        vector_dim=-1,
    )


def _by_words(tile: int, bits: int) -> Any:
    """Return the layout that has rows where the tensor cores have them, each shared by four threads in runs of inputs."""
    run = tile // _LANES
    at_once = min(run, _LOAD_BITS // bits)
    inner = () if at_once == run else ((at_once,),)
    last = -1 - len(inner)
    return plgpu.Layout.TILED(
        fragmented_array.Tiling(((64, tile), (16, tile), (8, tile), (run,), *inner)),
        warp_dims=(last - 6,),
        lane_dims=(last - 2, last - 1),
        vector_dim=-1,
    )


def _words(register: Any) -> Iterator[Any]:
    count = mgpu.utils.bitwidth(register.type) // 32
    words = mgpu.utils.bitcast(register, ir.VectorType.get((count,), _word_type()))
    for index in range(count):
        yield vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


def _integers(word: Any, places: tuple[int, ...], bits: int) -> Iterator[Any]:
    """Yield the pairs of signed integers whose lower ones begin at these places of a word, as 2 ** -6 of themselves."""
    for place in places:
        low = place % 8
        mask, sign = ((1 << bits) - 1) << low, 1 << (bits - 1 + low)
        moved = arith.shrui(word, _constant(place - low)) if place >= 8 else word
        above_zero = _masked(moved, mask * 0x10001, sign * 0x10001)
        least = 2.0 ** (_INTEGER_EXPONENT + _MOST_EXPONENT) * -(1 << (bits - 1))
        yield _multiplied(above_zero, 2.0 ** (_MOST_EXPONENT - low), least)


def _e4m3(word: Any) -> Iterator[Any]:
    """Yield the pairs of the even and the odd bytes of a word."""
    for selector in (0xA280, 0xB391):  # each byte, with its sign in all bits of the byte above
        yield _multiplied(_e4m3_bits(word, selector), 2.0**-_E4M3_EXPONENT, -0.0)


def _e4m3_bits(word: Any, selector: int) -> Any:
    """Return the bits of two of a word's e4m3 numbers as 2 ** _E4M3_EXPONENT of themselves."""
    signed = _instruction("prmt.b32", word, word, _constant(selector))
    return arith.andi(arith.shli(signed, _constant(4)), _constant(0x87F087F0))


def _e2m1(word: Any, scale: Any) -> Iterator[Any]:
    """Yield the pairs of e2m1 numbers half a word apart, times a pair of scales, in the order of `_integers`.

    A product has a number at two places: the lower one gives exponent and digit, the upper one the sign.
    """
    upper = arith.shrui(word, _constant(8))
    for byte in (word, upper):
        for mask, places in ((0x000F_000F, 1 << 6 | 1 << 12), (0x00F0_00F0, 1 << 2 | 1 << 8)):
            twice = arith.muli(arith.andi(byte, _constant(mask)), _constant(places))
            yield _fused(arith.andi(twice, _constant(_E2M1_BITS)), scale, _constant(_twice(-0.0)))


def _scale_pair(register: Any) -> Any:
    """Return a pair of equal bfloat16 numbers: an e4m3 scale times 2 ** _SCALE_EXPONENT. No one power of two gives that."""
    byte = vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
    word = arith.extui(_word_type(), mgpu.utils.bitcast(byte, ir.IntegerType.get_signless(8)))
    pair = _e4m3_bits(word, 0x8080)
    for exponent in (_MOST_EXPONENT, _SCALE_EXPONENT - _E4M3_EXPONENT - _MOST_EXPONENT):
        pair = _instruction("fma.rn.bf16x2", pair, _constant(_twice(2.0**exponent)), _constant(_twice(-0.0)))
    return pair


_PAIRS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "int4": partial(_integers, places=(0, 4, 8, 12), bits=4),
    "int8": partial(_integers, places=(0, 8), bits=8),
    "float8_e4m3fn": _e4m3,
}


def _masked(word: Any, mask: int, flipped: int) -> Any:
    """Return the bits of a word below a mask, some of them flipped, by one instruction."""
    return _instruction("lop3.b32", word, _constant(mask), _constant(flipped), table="0x6a")


def _multiplied(pair: Any, scale: float, offset: float) -> Any:
    """Return two bfloat16 numbers, given by their bits, times `scale` plus `offset`."""
    return _fused(pair, _constant(_twice(scale)), _constant(_twice(offset)))


def _fused(pair: Any, factors: Any, offsets: Any) -> Any:
    """Return two bfloat16 numbers times two others plus two others, all given by their bits."""
    found = _instruction("fma.rn.bf16x2", pair, factors, offsets)
    return mgpu.utils.bitcast(found, ir.VectorType.get((2,), ir.BF16Type.get()))


def _twice(number: float) -> int:
    """Return the bits of a pair of equal bfloat16 numbers, which have to hold the number exactly."""
    return int.from_bytes(struct.pack(">f", number)[:2]) * 0x10001


def _word_type() -> Any:
    return ir.IntegerType.get_signless(32)


def _constant(bits: int) -> Any:
    return mgpu.utils.c(bits - (bits >> 31 << 32), _word_type())


def _instruction(name: str, *operands: Any, table: str | None = None) -> Any:
    places = [*(f"${i}" for i in range(len(operands) + 1)), *([] if table is None else [table])]
    return llvm.inline_asm(_word_type(), operands, f"{name} {', '.join(places)};", "=r" + ",r" * len(operands))
