"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467) and LayerNorm (Ba et al., arXiv 1607.06450)."""

from __future__ import annotations

import math
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Float

from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import NormWeights

_ADDED_ALIKE: Final = 4096
"""Elements of an array from which on XLA:CPU sums every row in the same order, however many rows there are."""


class RMSNorm(nnx.Module):
    """Normalise the last axis in float32, then scale: see `NormWeights`."""

    def __init__(self, dim: int, eps: float, policy: DtypePolicy, weights: NormWeights = "plain") -> None:
        self.weight = parameter((dim,), (None,), policy.vectors)
        self.eps = eps
        self.weights = weights
        self.is_alike = policy.backend in NATIVE
        """True if a row's result must not depend on the number of rows, as in the native matmuls."""

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide, weight = x.astype(jnp.float32), self.weight[...]
        squares, num_rows = wide * wide, x.shape[0]
        if self.is_alike and x.size < _ADDED_ALIKE:
            num_more = -(-_ADDED_ALIKE // math.prod(x.shape[1:])) - num_rows
            squares = jnp.pad(squares, [(0, num_more), *[(0, 0)] * (x.ndim - 1)])
        scaled = wide * jax.lax.rsqrt(jnp.mean(squares, -1, keepdims=True)[:num_rows] + self.eps)
        if self.weights == "plain":
            return weight * scaled.astype(x.dtype)
        weight = weight.astype(jnp.float32)
        return (scaled * (weight + 1 if self.weights == "offset" else weight)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Centre and normalise the last axis in float32, then scale and shift in the activation's dtype."""

    def __init__(self, dim: int, eps: float, policy: DtypePolicy) -> None:
        self.weight = parameter((dim,), (None,), policy.vectors)
        self.bias = parameter((dim,), (None,), policy.vectors)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + self.eps)
        return self.weight[...] * scaled.astype(x.dtype) + self.bias[...]
