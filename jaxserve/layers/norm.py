"""Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467), and that of Ba et al. (arXiv 1607.06450)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.numerics import Numerics
from jaxserve.layers.param import parameter


class RMSNorm(nnx.Module):
    """Normalise the last axis in float32, then scale in the activation's dtype."""

    def __init__(self, dim: int, eps: float, numerics: Numerics) -> None:
        self.weight = parameter((dim,), (None,), numerics.vectors)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return self.weight[...] * scaled.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Centre and normalise the last axis in float32, then scale and shift in the activation's dtype."""

    def __init__(self, dim: int, eps: float, numerics: Numerics) -> None:
        self.weight = parameter((dim,), (None,), numerics.vectors)
        self.bias = parameter((dim,), (None,), numerics.vectors)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + self.eps)
        return self.weight[...] * scaled.astype(x.dtype) + self.bias[...]
