"""Matmuls with weights in words (`tpu_words`) for TPUs: words are fetched as they are stored and upcast in VMEM, unit by unit.

    grid = (tiles of rows, blocks of outputs)
       HBM -> VMEM   words of a block's outputs, all inputs       the next ones while these are computed
       unit          words -> bfloat16 [256, outputs] -> matmul with 256 inputs of the rows -> sums in float32

A tile's rows are fetched once, the weights once for each tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve_kernels.matmul.tpu import WordsTuning
from jaxserve_kernels.tpu_words import UNIT

_WORDS_OF_NUMBERS, _BLOCK = 32, 16
"""Words of a unit in NVFP4, and inputs that share a scale."""
_CODES_OF_HALF = 4
_EXPONENT_AND_DIGIT, _SIGN, _ONE = 0x01C0_01C0, -0x7FFF_8000, 0x3F80_3F80
"""Bits of pairs of bfloat16 numbers: those that an e2m1 number has beside its sign, the sign, and the number 1."""
_FIRST_BFLOAT16 = 6
"""Generation of TPUs from which on vector units compute with bfloat16."""


@runtime_checkable
class Upcast(Protocol):
    """Makes weights of a block of outputs from words in VMEM."""

    def scratch(self, num_inputs: int, num_outputs: int) -> list[Any]:
        """Return the memory that it needs of its own."""
        ...

    def prepare(self, refs: tuple[Any, ...]) -> None:
        """Fill its memory. refs: operands and that memory."""
        ...

    def unit(self, refs: tuple[Any, ...], index: Any) -> Float[Array, "I O"]:
        """Return the weights of a unit in float32 or bfloat16."""
        ...


def multiply(
    x: Float[Array, "T I"], operands: tuple[Array, ...], upcast: Upcast, tuning: WordsTuning
) -> Float[Array, "T O"]:
    """Return x @ weights in float32. operands: arrays whose last dimension are the outputs, and whose others are fetched whole."""
    (num_rows, num_inputs), num_outputs = x.shape, operands[0].shape[1]
    rows, outputs = tuning.rows, tuning.outputs
    padded = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    weight_bytes = sum(each.size * each.dtype.itemsize for each in operands)
    num_tiles = len(padded) // rows
    result: Array = pl.pallas_call(
        functools.partial(_kernel, upcast, len(operands)),
        out_shape=jax.ShapeDtypeStruct((len(padded), num_outputs), jnp.float32),
        grid=(num_tiles, pl.cdiv(num_outputs, outputs)),
        in_specs=[
            pl.BlockSpec((rows, num_inputs), lambda r, o: (r, 0)),
            *[pl.BlockSpec((len(each), outputs), lambda r, o: (0, o)) for each in operands],
        ],
        out_specs=pl.BlockSpec((rows, outputs), lambda r, o: (r, o)),
        scratch_shapes=upcast.scratch(num_inputs, outputs),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=tuning.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * num_inputs * num_outputs,
            bytes_accessed=num_tiles * weight_bytes + num_rows * (2 * num_inputs + 4 * num_outputs),
            transcendentals=0,
        ),
        name="words_matmul",
    )(padded, *operands)
    return result[:num_rows]


def _kernel(upcast: Upcast, num_operands: int, x: Any, *refs: Any) -> None:
    """One tile of rows with one block of outputs."""
    operands, out, scratch = refs[:num_operands], refs[num_operands], refs[num_operands + 1 :]
    write_matmul(upcast, x, (*operands, *scratch), out)


def write_matmul(upcast: Upcast, x: Any, refs: tuple[Any, ...], out: Any) -> None:
    """Write the matmul of rows with a block of outputs. refs: operands, and the memory of `upcast`."""
    upcast.prepare(refs)
    out[...] = jnp.zeros(out.shape, out.dtype)

    def add_unit(index: Any, _: None) -> None:
        rows = x[:, pl.ds(pl.multiple_of(index * UNIT, UNIT), UNIT)]
        weights = upcast.unit(refs, index).astype(rows.dtype)
        out[...] += jnp.dot(rows, weights, preferred_element_type=jnp.float32)

    jax.lax.fori_loop(0, x.shape[1] // UNIT, add_unit, None)


@dataclass(frozen=True, slots=True)
class Numbers:
    """NVFP4: the bits of e2m1 numbers in words, and e4m3 scales. All arithmetic is exact in bfloat16."""

    has_bfloat16: bool
    """True if the chip computes with bfloat16 outside of matmuls, two numbers in a lane."""

    def scratch(self, num_inputs: int, num_outputs: int) -> list[Any]:
        return [pltpu.VMEM((num_inputs // _BLOCK, num_outputs), jnp.int32 if self.has_bfloat16 else jnp.float32)]

    def prepare(self, refs: tuple[Any, ...]) -> None:
        """Write half of each scale in float32, or as a pair of bfloat16 numbers: packed rows cannot be taken from anywhere."""
        _, scales, halves = refs
        wide = scales[...].astype(jnp.float32) / 2
        if self.has_bfloat16:
            bits = jax.lax.bitcast_convert_type(wide, jnp.int32)
            wide = bits | jax.lax.shift_right_logical(bits, jnp.full_like(bits, 16))
        halves[...] = wide

    def unit(self, refs: tuple[Any, ...], index: Any) -> Float[Array, "I O"]:
        words, _, halves = refs
        own = words[pl.ds(pl.multiple_of(index * _WORDS_OF_NUMBERS, _WORDS_OF_NUMBERS), _WORDS_OF_NUMBERS), :]
        pieces = []
        for place in range(_CODES_OF_HALF):
            first = (index * _CODES_OF_HALF + place) * _CODES_OF_HALF
            scales = [self._scale(halves[pl.ds(first + block, 1), :]) for block in range(_CODES_OF_HALF)]
            pieces.append(self._multiplied(own, 4 * place, jnp.concatenate(scales)))
        return jnp.concatenate(pieces)

    def _scale(self, row: Array) -> Float[Array, "R O"]:
        """Return half of the scale of a block for each of its inputs."""
        if self.has_bfloat16:
            pairs: Array = pltpu.bitcast(jnp.broadcast_to(row, (_BLOCK // 2, row.shape[1])), jnp.bfloat16)
            return pairs
        return jnp.broadcast_to(row, (_BLOCK, row.shape[1]))

    def _multiplied(self, words: Int[Array, "W O"], place: int, halves: Float[Array, "R O"]) -> Float[Array, "R O"]:
        """Return e2m1 numbers s e e m, whose last bits are at this place of half words, times twice these numbers.

        With x = (1 + m / 2) * 2 ** e, twice the size of a number is 2x - 2 if e is 0 and x otherwise: the smaller of the two.
        """
        bits = (_moved(words, place, 6) & _EXPONENT_AND_DIGIT) + _ONE
        x = pltpu.bitcast(bits, jnp.bfloat16).astype(halves.dtype)
        scaled = (jnp.minimum(x, x + x - 2) * halves).astype(jnp.bfloat16)
        signed = pltpu.bitcast(scaled, jnp.int32) ^ (_moved(words, place + 3, 15) & _SIGN)
        made: Array = pltpu.bitcast(signed, jnp.bfloat16)
        return made


def _moved(words: Int[Array, "W O"], source: int, target: int) -> Int[Array, "W O"]:
    """Return words whose bits at one place are at another; other bits have no meaning."""
    return words << (target - source) if target >= source else words >> (source - target)


@functools.partial(jax.jit, static_argnames=("tuning", "has_bfloat16"))
def numbers_matmul(
    x: Float[Array, "T I"],
    words: Int[Array, "W O"],
    scales: Float[Array, "G O"],
    *,
    tuning: WordsTuning,
    has_bfloat16: bool,
) -> Float[Array, "T O"]:
    """Return x @ (numbers times the scales of their blocks).T of weights in NVFP4."""
    return multiply(x, (words, scales), Numbers(has_bfloat16), tuning)


def has_bfloat16() -> bool:
    """Return True if the TPU that is compiled for computes with bfloat16 outside of matmuls."""
    return pltpu.is_tpu_device() and pltpu.get_tpu_info().generation >= _FIRST_BFLOAT16
