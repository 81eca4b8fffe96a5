"""Upcast the words of GGUF blocks (`tpu_words`) with outputs as lanes: by the kernel, unit by unit, and by the reference.

A code is converted to float32 where it lies in its word, a power of two too large, and the scale of its group is as much
smaller, so nothing is shifted. Scales and differences are those of ggml in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.block_kinds import GROUP, BlockKind
from jaxserve_kernels.tpu_words import UNIT, code_words, scale_words

_LOW_WORDS = 32
"""Words of a unit's 4 low bits."""
_GROUPS = UNIT // GROUP
_NOT_FINITE = 0x1F << 23
"""Least bits of a float16 number that is infinite or NaN, moved to the place of float32's."""


class _Scales(NamedTuple):
    """Scales of a unit: a weight is `code * steps - offsets`. Rows are groups, four of them in an array."""

    steps: list[Float[Array, "*U 4 O"]]
    offsets: list[Float[Array, "*U 4 O"]]


def by_unit(kind: BlockKind, words: Int[Array, "W O"]) -> tuple[Int[Array, "U C O"], Int[Array, "U S O"]]:
    """Return the codes and the scales of all units; devices do not split the inputs."""
    num_units = len(words) // (code_words(kind) + scale_words(kind))
    num_codes, num_scales = num_units * code_words(kind), num_units * scale_words(kind)
    codes, scales = words[:num_codes], words[num_codes : num_codes + num_scales]
    return codes.reshape(num_units, -1, words.shape[1]), scales.reshape(num_units, -1, words.shape[1])


def upcast(kind: BlockKind, codes: Int[Array, "*U C O"], scales: Int[Array, "*U S O"]) -> Float[Array, "*U I O"]:
    """Return the weights of a unit in float32."""
    groups = 16 if kind.name == "Q6_K" else _GROUPS
    size, steps = UNIT // groups, _scales(kind, scales)
    pieces = []
    for group in range(groups):
        numbers, place = _codes(kind, codes, group * size // GROUP)
        first = group * size % GROUP
        step, offset = (each[group // 4][..., group % 4 : group % 4 + 1, :] for each in steps)
        own = numbers[..., first : first + size, :].astype(jnp.float32)
        pieces.append(own * (step * 2.0**-place) - offset)
    return jnp.concatenate(pieces, axis=-2)


def _codes(kind: BlockKind, words: Int[Array, "*U C O"], group: int) -> tuple[Int[Array, "*U 32 O"], int]:
    """Return the codes of 32 inputs times a power of two, and its exponent."""
    if kind.bits == 8:
        byte, half = divmod(group, 2)
        return _field(words[..., GROUP * half : GROUP * (half + 1), :], 8 * byte, 8)
    numbers, place = _field(words[..., :_LOW_WORDS, :], 4 * group, 4)
    if kind.bits == 4:
        return numbers, place
    width = kind.bits - 4
    upper = [
        _moved(words[..., _LOW_WORDS:, :], 4 * group + at, place + 4) & ((1 << width) - 1) << (place + 4)
        for at in range(0, 4, width)
    ]
    return numbers | jnp.concatenate(upper, axis=-2), place


def _field(words: Int[Array, "*U W O"], place: int, bits: int) -> tuple[Int[Array, "*U W O"], int]:
    """Return numbers of so many bits at a place of words, and the place where they are returned: not at the sign."""
    if place + bits == 32:
        return jax.lax.shift_right_logical(words, jnp.full_like(words, place)), 0
    return words & ((1 << bits) - 1) << place, place


def _moved(words: Int[Array, "*U W O"], source: int, target: int) -> Int[Array, "*U W O"]:
    """Return words whose bits at one place are at another; other bits have no meaning."""
    return words << (target - source) if target > source else words >> (source - target)


def _scales(kind: BlockKind, words: Int[Array, "*U S O"]) -> _Scales:
    rows = words[..., :4, :]
    if kind.num_inputs == GROUP:
        steps = list(_halves(rows))
        if kind.has_minimum:  # which is added
            return _Scales(steps, [-each for each in _halves(words[..., 4:, :])])
    else:
        d, m = _halves(words[..., 4:, :])
        factors = list(_bytes(rows, is_signed=not kind.has_minimum))
        if kind.has_minimum:
            return _Scales([each * d for each in factors[:2]], [each * m for each in factors[2:]])
        steps = [each * d for each in factors]
    return _Scales(steps, [each * kind.zero for each in steps])


def _bytes(words: Int[Array, "*U W O"], *, is_signed: bool) -> Iterator[Float[Array, "*U W O"]]:
    for place in range(0, 32, 8):
        byte = words << (24 - place) >> 24 if is_signed else words >> place & 255
        yield byte.astype(jnp.float32)


def _halves(words: Int[Array, "*U W O"]) -> Iterator[Float[Array, "*U W O"]]:
    """Yield the float16 numbers in the low and the high halves of words, as float32."""
    for bits in (words, words >> 16):
        moved = (bits & 0x7FFF) << 13
        bias = jnp.where(moved >= _NOT_FINITE, 224 << 23, 112 << 23)  # of infinity and NaN the exponent stays the last
        normal = jax.lax.bitcast_convert_type(moved + bias, jnp.float32)
        subnormal = (bits & 0x3FF).astype(jnp.float32) * 2.0**-24
        size = jnp.where(moved < 1 << 23, subnormal, normal)
        yield jnp.where(bits & 0x8000 == 0, size, -size)
