"""What 8-bit keys and values stand for."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float


class KVScales(NamedTuple):
    """What a layer's 8-bit numbers are multiplied by, per head; one number for all is an array of equal ones."""

    k: Float[Array, "K"]
    v: Float[Array, "K"]
