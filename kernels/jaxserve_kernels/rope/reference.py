"""Rotary position embedding (Su et al., arXiv 2104.09864), halves rotated as Hugging Face stores them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Rotation(NamedTuple):
    """Cosine and sine of every token's angles, computed once a step for all layers."""

    cos: Float[Array, "T H/2"]
    sin: Float[Array, "T H/2"]


def rotate(x: Float[Array, "T N H"], rotation: Rotation) -> Float[Array, "T N H"]:
    """Turn each pair (i, i + H/2) by its token's angle."""
    cos, sin = rotation.cos[:, None, :], rotation.sin[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x.dtype)
