"""Scales of 8-bit keys and values."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class KVScales(NamedTuple):
    """Factors of a layer's 8-bit numbers, per head; a single factor is an array of equal numbers."""

    k: Float[Array, "K"]
    v: Float[Array, "K"]
