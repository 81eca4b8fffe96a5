"""The counter-based generator threefry-2x32 with 20 rounds (arXiv 1103.1580), with the bits of `jax.random`.

jax computes it by a loop on CPUs, with a kernel for each part of a round, which every program that samples would compile. Written
out, all rounds are one kernel.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

Pair = tuple[UInt32[Array, "*s"], UInt32[Array, "*s"]]
"""64 bits as two words."""

_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Bits by which each round rotates: those of even groups, then of odd ones. The key is added after each group."""
_NUM_GROUPS: Final = 5
_PARITY: Final = 0x1BD11BDA
_MANTISSA_BITS: Final = 23


def threefry(key: Pair, counter: Pair) -> Pair:
    """Return the random bits of a counter."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(_NUM_GROUPS):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ _rotated(second, distance)
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second


def uniforms(seeds: Int[Array, "B"], positions: Int[Array, "B"], count: int) -> Float[Array, "N B"]:
    """Return N draws in [0, 1) for each row: `jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (N,))`."""
    zero = jnp.uint32(0)
    key = threefry((zero, seeds.astype(jnp.uint32)), (zero, positions.astype(jnp.uint32)))
    first, second = threefry(key, (zero, jnp.arange(count, dtype=jnp.uint32)[:, None]))
    one = jnp.float32(1).view(jnp.uint32)  # with a mantissa of random bits: a number in [1, 2)
    bits = one | ((first ^ second) >> jnp.uint32(32 - _MANTISSA_BITS))
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - 1


def _rotated(words: UInt32[Array, "*s"], distance: int) -> UInt32[Array, "*s"]:
    rotated: Array = (words << jnp.uint32(distance)) | (words >> jnp.uint32(32 - distance))
    return rotated
