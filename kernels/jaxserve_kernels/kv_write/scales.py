"""Scales of 8-bit keys and values."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class KVScales(NamedTuple):
    """Factors of a layer's 8-bit numbers: one for each KV head, or one for each number of each head.

    A number of the pool times its factor is the number of the key or value. A single factor for all heads is an array of equal
    numbers.
    """

    k: Float[Array, "K"] | Float[Array, "K H"]
    v: Float[Array, "K"] | Float[Array, "K H"]

    @property
    def by_number(self) -> KVScales:
        """The factors with an axis of numbers, whose size is 1 if all numbers of a head have one factor."""
        return KVScales(*(each if each.ndim == 2 else each[:, None] for each in self))
