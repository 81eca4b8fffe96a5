"""Upcast the codes of GGUF blocks to bfloat16 in words of 32 bits, as `jaxserve_kernels.words` says.

The warp that has a tile's 16 outputs reads its words: a thread those of two outputs, 8 of each block's inputs. Activations are put into
the order that results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from jaxserve_kernels import words
from jaxserve_kernels.block_kinds import GROUP, TILE, BlockKind

_LANES, _WARP, _WARPS = 4, 32, 4
_HALF = 8
"""Outputs between the two of a thread."""
_NIBBLES, _BYTES = (0, 4, 8, 12), (0, 8)
"""Places of the lower codes of a word's pairs."""
_VECTOR = 4 * TILE
"""Bytes of a vector of 4 bytes of each output."""
_FACTOR_BYTES = 16 * TILE
"""Bytes of the factors of a tile's block, in types with scales of two levels."""
_DYNAMIC = -(2**31)
"""Marks an index that is a value, for LLVM."""


def group_of(kind: BlockKind) -> int:
    """Return the inputs that share a scale."""
    return 16 if kind.name == "Q6_K" else GROUP


def permuted(x: Float[Array, "G T I"], kind: BlockKind) -> Float[Array, "G T I"]:
    """Return activations of groups in the order of upcast codes."""
    parted = x.reshape(*x.shape[:2], _LANES, -1, 2, 2)  # of a thread's 4 or 8 inputs: 4 a + 2 b + c
    order = (0, 1, 5, 3, 2, 4) if kind.bits == 4 else (0, 1, 3, 5, 2, 4)
    return parted.transpose(order).reshape(x.shape)


def upcast(tile: Any, kind: BlockKind, groups: Sequence[int]) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Return the codes of some groups of a step less their zero, in units of a power of two, and for each group the scale of its
    codes, in float32, and what is subtracted from its weights, if the type has that.

    tile: the step's bytes of 64 outputs in shared memory.
    """
    group, shape = group_of(kind), (_WARPS * TILE, group_of(kind) * len(groups))
    num_scales = len(groups) * (1 + kind.has_minimum)
    of_rows = plgpu.ShapeDtypeStruct(shape[:1], jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=(
            plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
            *[of_rows] * num_scales,
        ),
    )  # type: ignore[untyped-decorator]
    def convert(_: Any, ref: Any) -> Any:
        reader = _Reader(ref, kind, tile.shape[1] * tile.shape[2])
        wide = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        scales = np.empty((num_scales, *mgpu.WGMMA_ROW_LAYOUT.registers_shape(shape[:1])), object)
        for place, number in enumerate(groups):
            for half in range(2):
                wide.reshape(len(groups), group // 8, 2)[place, :, half] = list(reader.codes(number, half))
                scales.reshape(-1, len(groups), 2)[:, place, half] = list(reader.scales(number, half))
        arrays = [
            mgpu.FragmentedArray(_registers=each, _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None) for each in scales
        ]
        return (mgpu.FragmentedArray(_registers=wide, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None), *arrays)

    wide, *scales = convert(tile)
    return wide, scales[: len(groups)], scales[len(groups) :]


class _Reader:
    """Reads what a thread needs of the tile of its warp."""

    def __init__(self, ref: Any, kind: BlockKind, step_bytes: int) -> None:
        thread = arith.remui(mgpu.utils.thread_idx(), _constant(_WARP * _WARPS))
        lane = arith.remui(thread, _constant(_WARP))
        self._start, self._kind = mgpu.utils.memref_ptr(ref), kind
        self._tile = arith.muli(arith.divui(thread, _constant(_WARP)), _constant(step_bytes))
        self._output = arith.divui(lane, _constant(_LANES))
        self._lane = arith.remui(lane, _constant(_LANES))

    def codes(self, group: int, half: int) -> Iterator[Any]:
        """Yield the pairs of an output's codes that are this thread's, of a group."""
        kind = self._kind
        if kind.bits == 6:
            return words.centred_pairs(self._six_bits(group, half), _BYTES, 8, kind.zero)
        block, part = divmod(group, kind.num_groups)
        at, count = block * kind.tile_bytes + part * kind.code_bytes, kind.bits // 4
        first = arith.muli(self._lane, _constant(count * _VECTOR))
        loaded = [self._word(first, at + number * _VECTOR, half) for number in range(count)]
        if kind.bits == 4:
            return words.centred_pairs(loaded[0], _NIBBLES, 4, kind.zero)
        of_bytes = loaded if kind.bits == 8 else self._five_bits(loaded[0], at, half)
        return (pair for word in of_bytes for pair in words.centred_pairs(word, _BYTES, 8, kind.zero))

    def scales(self, group: int, half: int) -> Iterator[Any]:
        """Yield the scale of a group's codes, and what is subtracted from its weights, for an output, in float32."""
        kind = self._kind
        block, part = divmod(group, kind.num_inputs // group_of(kind))
        end = (block + 1) * kind.tile_bytes
        factors = end - 2 * TILE * (1 + kind.has_minimum) - _FACTOR_BYTES
        for number in range(1 + kind.has_minimum):
            scale = self._float(end - 2 * TILE * (1 + kind.has_minimum - number), half)
            if kind.num_inputs != GROUP:
                factor = self._load(self._output, factors + TILE * (part + 8 * number) + _HALF * half, _integer(8))
                wide = (arith.extui if kind.has_minimum else arith.extsi)(_integer(32), factor)
                scale = arith.mulf(scale, arith.sitofp(ir.F32Type.get(), wide))
            added = -1.0 if kind.num_inputs == GROUP else 1.0  # a minimum of one level is added
            unit = words.factor(jnp.int8, jnp.bfloat16) if number == 0 else added
            scale = arith.mulf(scale, mgpu.utils.c(unit, ir.F32Type.get()))
            yield vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), scale)

    def _five_bits(self, low: Any, at: int, half: int) -> Iterator[Any]:
        """Yield words of this thread's eight codes of 32 inputs, a byte each. low: their other bits."""
        fifth = self._word(_constant(0), at + 4 * _VECTOR, half)
        fifth = arith.shrui(fifth, arith.muli(self._lane, _constant(2)))
        for number in range(2):
            nibbles = arith.andi(arith.shrui(low, _constant(4 * number)), _constant(0x0F0F0F0F))
            bits = arith.andi(arith.shrui(fifth, _constant(number)), _constant(0x01010101))
            yield arith.ori(nibbles, arith.shli(bits, _constant(4)))

    def _six_bits(self, group: int, half: int) -> Any:
        """Return this thread's four codes of 16 inputs, a byte each."""
        at, part = group // 2 * self._kind.code_bytes, group % 2
        pair, odd = (of(self._lane, _constant(2)) for of in (arith.divui, arith.remui))
        low = self._word(arith.muli(pair, _constant(_VECTOR)), at + 2 * part * _VECTOR, half)
        high = self._word(_constant(0), at + (4 + part) * _VECTOR, half)
        low = arith.andi(arith.shrui(low, arith.muli(odd, _constant(4))), _constant(0x0F0F0F0F))
        high = arith.andi(arith.shrui(high, arith.muli(self._lane, _constant(2))), _constant(0x03030303))
        return arith.ori(low, arith.shli(high, _constant(4)))

    def _word(self, vector_at: Any, at: int, half: int) -> Any:
        own = arith.addi(vector_at, arith.muli(self._output, _constant(4)))
        return self._load(own, at + 4 * _HALF * half, _integer(32))

    def _float(self, at: int, half: int) -> Any:
        narrow = self._load(arith.muli(self._output, _constant(2)), at + 2 * _HALF * half, ir.F16Type.get())
        return arith.extf(ir.F32Type.get(), narrow)

    def _load(self, own: Any, at: int, kind: Any) -> Any:
        offset = arith.addi(arith.addi(self._tile, own), _constant(at))
        address = llvm.getelementptr(
            self._start.type, self._start, [offset], [_DYNAMIC], _integer(8), llvm.GEPNoWrapFlags.none
        )
        return llvm.load(kind, address)


def _integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def _constant(number: int) -> Any:
    return mgpu.utils.c(number, _integer(32))
