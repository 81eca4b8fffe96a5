"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467) and LayerNorm (Ba et al., arXiv 1607.06450)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.alike import padded_alike
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Float

from jaxserve.layers.linear import Matrix
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig, NormKind, NormWeights


class RMSNorm(nnx.Module):
    """Normalise the last axis in float32, then scale: see `NormWeights`."""

    def __init__(
        self,
        dim: int,
        eps: float,
        policy: DtypePolicy,
        weights: NormWeights = "plain",
        *,
        num_groups: int | None = None,
        axis: str | None = None,
    ) -> None:
        """num_groups: length of the axis before the last, if each of its places has weights of its own. axis: logical axis of
        the weights."""
        self.weight = None if weights == "none" else parameter(((num_groups or 1) * dim,), (axis,), policy.vectors)
        self.eps, self.num_groups = eps, num_groups
        self.weights = weights
        self.is_alike = policy.backend in NATIVE

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scaled = normalized(x, self.eps, is_alike=self.is_alike)
        if self.weight is None:
            return scaled.astype(x.dtype)
        if self.weights == "plain":
            return _by_group(self.weight[...], self.num_groups) * scaled.astype(x.dtype)
        return (scaled * self.factors).astype(x.dtype)

    @property
    def factors(self) -> Float[Array, "*A D"]:
        """The factors on normalised values, in float32."""
        assert self.weight is not None, "a norm with weights"
        weight = _by_group(self.weight[...], self.num_groups).astype(jnp.float32)
        return weight + 1 if self.weights == "offset" else weight


def _by_group(weight: Float[Array, "_"], num_groups: int | None) -> Float[Array, "*A D"]:
    return weight if num_groups is None else weight.reshape(num_groups, -1)


def normalized(x: Float[Array, "*rows D"], eps: float, *, is_alike: bool) -> Float[Array, "*rows D"]:
    """Return x over the root mean square of its last axis, in float32. is_alike: see `means`."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(means(wide * wide, is_alike=is_alike) + eps)


class LayerNorm(nnx.Module):
    """Centre and normalise the last axis in float32, then scale and perhaps shift in the activation's dtype."""

    def __init__(
        self,
        dim: int,
        eps: float,
        policy: DtypePolicy,
        *,
        has_bias: bool = True,
        has_weight: bool = True,
        is_offset: bool = False,
        is_alike: bool = False,
        num_groups: int | None = None,
        axis: str | None = None,
    ) -> None:
        """is_offset: True if weights are stored minus 1. is_alike: True if a row's result must not depend on the number of rows.
        num_groups, axis: as for `RMSNorm`, of biases, too."""
        shape = ((num_groups or 1) * dim,)
        self.weight = parameter(shape, (axis,), policy.vectors) if has_weight else None
        self.bias = parameter(shape, (axis,), policy.vectors) if has_bias else None
        self.eps, self.is_offset, self.is_alike, self.num_groups = eps, is_offset, is_alike, num_groups

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        centred = wide - means(wide, is_alike=self.is_alike)
        scaled = centred * jax.lax.rsqrt(means(centred * centred, is_alike=self.is_alike) + self.eps)
        if self.weight is None:
            made = scaled.astype(x.dtype)
        elif self.is_offset:
            made = ((_by_group(self.weight[...], self.num_groups).astype(jnp.float32) + 1) * scaled).astype(x.dtype)
        else:
            made = _by_group(self.weight[...], self.num_groups) * scaled.astype(x.dtype)
        return made if self.bias is None else made + _by_group(self.bias[...], self.num_groups)


class GatedNorm(nnx.Module):
    """Compute y * sigmoid(up(silu(down(y)))) of a decoder's normalised D values y, with two matrices of a small rank."""

    def __init__(self, config: DecoderConfig, rank: int, policy: DtypePolicy) -> None:
        self.norm = make_norm(config, policy)
        self.gate_down = Matrix(rank, config.hidden_size, (None, "embed"), policy.unquantized)
        self.gate_up = Matrix(config.hidden_size, rank, ("embed", None), policy.unquantized)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        made, count = self.norm(x), jnp.int32(len(x))
        inner = jax.nn.silu(self.gate_down.multiply(made, count, is_rounded=True))
        gate = self.gate_up.multiply(inner, count, is_rounded=True)
        return (made * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(made.dtype)


def make_norm(
    config: DecoderConfig, policy: DtypePolicy, *, weights: NormWeights | None = None, eps: float | None = None
) -> RMSNorm | LayerNorm:
    """Return a norm of a decoder's D values of each token. weights, eps: None: those of the decoder's norms."""
    return norm_of(config.norm_kind, config.hidden_size, config, policy, weights=weights, eps=eps)


def norm_of(
    kind: NormKind,
    dim: int,
    config: DecoderConfig,
    policy: DtypePolicy,
    *,
    weights: NormWeights | None = None,
    eps: float | None = None,
    num_groups: int | None = None,
    axis: str | None = None,
) -> RMSNorm | LayerNorm:
    """Return a norm of `dim` values. weights, eps: see `make_norm`; num_groups, axis: see `RMSNorm`."""
    eps, weights = eps or config.norm_eps, weights or config.norm_weights
    if kind == "rms":
        return RMSNorm(dim, eps, policy, weights, num_groups=num_groups, axis=axis)
    return LayerNorm(
        dim,
        eps,
        policy,
        has_bias=kind == "layer_with_bias",
        has_weight=weights != "none",
        is_offset=weights == "offset",
        is_alike=policy.backend in NATIVE,
        num_groups=num_groups,
        axis=axis,
    )


def means(values: Float[Array, "*rows D"], *, is_alike: bool) -> Float[Array, "*rows 1"]:
    """Return the means over the last axis. is_alike: they do not depend on the number of rows, as in native matmuls."""
    added = padded_alike(values) if is_alike else values
    return jnp.mean(added, -1, keepdims=True)[: len(values)]
