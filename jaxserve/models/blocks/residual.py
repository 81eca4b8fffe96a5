"""Sums of a block's output and what it was made of: with factors by dimension, or over several residual streams."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Float

from jaxserve.layers.linear import Matrix, Tokens
from jaxserve.layers.norm import RMSNorm, means
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.routing import sums
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.hyper import HyperConfig


class ResidualAffine(nnx.Module):
    """Add a block's output to the residual stream; each dimension of both has a bias and then a factor."""

    def __init__(self, dim: int, policy: DtypePolicy) -> None:
        make = partial(parameter, (dim,), (None,), policy.vectors)
        self.hidden_states_scale, self.hidden_states_bias = make(), make()
        self.residual_scale, self.residual_bias = make(), make()

    def __call__(self, x: Float[Array, "T D"], made: Float[Array, "T D"]) -> Float[Array, "T D"]:
        made = (made + self.hidden_states_bias[...]) * self.hidden_states_scale[...]
        return made + (x + self.residual_bias[...]) * self.residual_scale[...]


class HyperSum(NamedTuple):
    """The weights of a token's streams after a block, in float32."""

    shares: Float[Array, "A T"]
    """Factor of each stream on the block's output."""
    mixes: Float[Array, "A A T"] | None
    """Factor of each stream (second axis) on each stream before the block (first axis); None: a stream stays as it is."""

    def __call__(self, streams: Float[Array, "A T D"], made: Float[Array, "T D"]) -> Float[Array, "A T D"]:
        """Return the streams with the block's output `made` added."""
        wide = streams.astype(jnp.float32)
        if self.mixes is not None:
            wide = sums(self.mixes[..., None] * wide[:, None], 0, is_alike=True)[0]
        return (wide + self.shares[..., None] * made.astype(jnp.float32)).astype(streams.dtype)


class HyperWeights(nnx.Module):
    """Weights of every token's streams: a matmul of all of them, over their root mean square, with factors and biases."""

    def __init__(self, config: DecoderConfig, hyper: HyperConfig, sizes: tuple[int, ...], policy: DtypePolicy) -> None:
        """sizes: numbers of weights that share a factor."""
        count, plain = sum(sizes), replace(policy.unquantized, weights=jnp.dtype(jnp.float32))
        self.fn = Matrix(count, hyper.num_streams * config.hidden_size, (None, None), plain)
        self.base = parameter((count,), (None,), jnp.dtype(jnp.float32))
        self.factors = parameter((len(sizes),), (None,), jnp.dtype(jnp.float32))
        self.sizes, self.eps, self.norm_eps = sizes, hyper.eps, config.norm_eps
        self.is_alike = policy.backend in NATIVE

    def logits(self, streams: Float[Array, "A T D"], tokens: Tokens) -> list[Float[Array, "_ T"]]:
        """Return the weights in float32, in parts of `sizes`, before their activation."""
        flat = jnp.moveaxis(streams, 0, 1).reshape(streams.shape[1], -1).astype(jnp.float32)  # (T, A * D)
        factors = jax.lax.rsqrt(means(jnp.square(flat), is_alike=self.is_alike) + self.norm_eps)
        found = self.fn.multiply(flat, tokens.num_real) * factors
        scales = jnp.repeat(self.factors[...], jnp.array(self.sizes), total_repeat_length=sum(self.sizes))
        starts = [sum(self.sizes[:index]) for index in range(1, len(self.sizes))]
        return jnp.split((found * scales + self.base[...]).T, starts)

    def collapsed(self, streams: Float[Array, "A T D"], logits: Float[Array, "A T"]) -> Float[Array, "T D"]:
        """Return the sum of the streams, weighted by sigmoids."""
        weights = jax.nn.sigmoid(logits) + self.eps
        weighted = weights[..., None] * streams.astype(jnp.float32)
        return sums(weighted, 0, is_alike=True)[0].astype(streams.dtype)


class HyperConnection(HyperWeights):
    """The hyper-connection of a block: what it reads of the streams, and how its output is added to them."""

    def __init__(self, config: DecoderConfig, hyper: HyperConfig, policy: DtypePolicy) -> None:
        count = hyper.num_streams
        sizes = (count, count, count * count) if hyper.num_sinkhorn_steps else (count, count)
        super().__init__(config, hyper, sizes, policy)
        self.hyper = hyper

    def __call__(self, streams: Float[Array, "A T D"], tokens: Tokens) -> tuple[Float[Array, "T D"], HyperSum]:
        """Return the input of the block, and the sum that its output goes into."""
        with jax.named_scope("hyper_connection"):
            read, shares, *mixes = self.logits(streams, tokens)
            shares = self.hyper.share_scale * jax.nn.sigmoid(shares) + self.hyper.share_eps
            return self.collapsed(streams, read), HyperSum(shares, self._doubly_stochastic(mixes[0]) if mixes else None)

    def _doubly_stochastic(self, logits: Float[Array, "AA T"]) -> Float[Array, "A A T"]:
        """Return the softmax over the second axis, its sums over both axes brought near 1 (Sinkhorn-Knopp)."""
        count = self.hyper.num_streams
        found = jax.nn.softmax(logits.reshape(count, count, -1), 1) + self.eps
        found = found / (sums(found, 0, is_alike=True) + self.eps)
        for _ in range(self.hyper.num_sinkhorn_steps - 1):
            for axis in (1, 0):
                found = found / (sums(found, axis, is_alike=True) + self.eps)
        return found


class GatedStreams(nnx.Module):
    """The mean of all streams, each normalised with weights of its own and gated number by number (Qwen4-Exp).

    The gates come from all normalised streams, by two matrices of a small rank that are never quantised.
    """

    def __init__(self, config: DecoderConfig, hyper: HyperConfig, rank: int, policy: DtypePolicy) -> None:
        width, plain = hyper.num_streams * config.hidden_size, policy.unquantized
        self.hc_norm = RMSNorm(
            config.hidden_size, config.norm_eps, policy, config.norm_weights, num_groups=hyper.num_streams
        )
        self.input_mix_weight_down = Matrix(rank, width, (None, None), plain)
        self.input_mix_weight_up = Matrix(width, rank, (None, None), plain)
        self.num_streams = hyper.num_streams

    def read(self, streams: Float[Array, "A T D"], tokens: Tokens) -> tuple[Float[Array, "T D"], Float[Array, "T AD"]]:
        """Return the mean of the gated streams, and all of them normalised, side by side."""
        normed = self.hc_norm(jnp.moveaxis(streams, 0, 1))  # (T, A, D)
        flat, count = normed.reshape(len(normed), -1), self.num_streams
        inner = self.input_mix_weight_down.multiply(flat, tokens.num_real, is_rounded=True) / count
        gates = self.input_mix_weight_up.multiply(jax.nn.silu(inner), tokens.num_real)
        gated = jax.nn.sigmoid(gates).reshape(normed.shape) * normed.astype(jnp.float32)
        return (sums(gated, 1, is_alike=True)[:, 0] / count).astype(streams.dtype), flat


class GatedConnection(GatedStreams):
    """The gated residual of a block: what it reads of the streams, and how its output is added to them."""

    def __init__(self, config: DecoderConfig, hyper: HyperConfig, rank: int, policy: DtypePolicy) -> None:
        super().__init__(config, hyper, rank, policy)
        count = hyper.num_streams
        self.block_inject_weight = Matrix(count, count * config.hidden_size, (None, None), policy.unquantized)
        self.share_scale = hyper.share_scale

    def __call__(self, streams: Float[Array, "A T D"], tokens: Tokens) -> tuple[Float[Array, "T D"], HyperSum]:
        """Return the input of the block, and the sum that its output goes into."""
        with jax.named_scope("hyper_connection"):
            read, flat = self.read(streams, tokens)
            shares = self.block_inject_weight.multiply(flat, tokens.num_real).T / self.num_streams
            return read, HyperSum(self.share_scale * jax.nn.sigmoid(shares), None)


class GatedHead(GatedStreams):
    """The streams of every token: copies of its embedding before the first layer, and their gated mean after the last."""

    def split(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "A T D"]:
        """Return the streams of embeddings."""
        return jnp.broadcast_to(x, (self.num_streams, *x.shape))

    def join(self, streams: Float[Array, "A T D"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the mean of the gated streams."""
        return self.read(streams, tokens)[0]


class HyperMean(nnx.Module):
    """The streams of every token: copies of its embedding before the first layer, and their mean after the last (GLM-5.3)."""

    def __init__(self, hyper: HyperConfig) -> None:
        self.num_streams = hyper.num_streams

    def split(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "A T D"]:
        """Return the streams of embeddings."""
        return jnp.broadcast_to(x, (self.num_streams, *x.shape))

    def join(self, streams: Float[Array, "A T D"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the mean of the streams."""
        mean = sums(streams.astype(jnp.float32), 0, is_alike=True)[0] / self.num_streams
        return mean.astype(streams.dtype)


class HyperHead(HyperWeights):
    """The streams of every token: copies of its embedding before the first layer, and a weighted sum after the last."""

    def __init__(self, config: DecoderConfig, hyper: HyperConfig, policy: DtypePolicy) -> None:
        super().__init__(config, hyper, (hyper.num_streams,), policy)
        self.num_streams = hyper.num_streams

    def split(self, x: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "A T D"]:
        """Return the streams of embeddings."""
        return jnp.broadcast_to(x, (self.num_streams, *x.shape))

    def join(self, streams: Float[Array, "A T D"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the weighted sum of the streams."""
        return self.collapsed(streams, self.logits(streams, tokens)[0])


def hyper_connection(
    config: DecoderConfig, hyper: HyperConfig, policy: DtypePolicy
) -> HyperConnection | GatedConnection:
    """Return the hyper-connection of a block."""
    if hyper.gate_rank is not None:
        return GatedConnection(config, hyper, hyper.gate_rank, policy)
    return HyperConnection(config, hyper, policy)


def hyper_head(config: DecoderConfig, hyper: HyperConfig, policy: DtypePolicy) -> HyperHead | HyperMean | GatedHead:
    """Return what makes streams and joins them."""
    if hyper.gate_rank is not None:
        return GatedHead(config, hyper, hyper.gate_rank, policy)
    return HyperHead(config, hyper, policy) if hyper.has_head else HyperMean(hyper)
