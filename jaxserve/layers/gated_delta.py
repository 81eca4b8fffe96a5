"""The gated delta net of Qwen3-Next and Qwen3.5 (Yang et al., arXiv 2412.06464)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.linear_attention import linear_attention
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, RecurrentState
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import GatedDeltaConfig
from jaxserve.sharding.shard_map import has_mesh, sharded

_BY_HEAD = (None, "delta_heads")
"""Axes of tokens, or rows, by head."""
_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


class GatedDeltaNet(nnx.Module):
    """Convolve queries, keys and values, attend by the gated delta rule, then norm, gate and project each value head.

    The devices of a mesh share the heads from linear attention to the output projection, and their states. Each computes the
    queries, keys and values of all heads, which the convolution mixes in the checkpoint's order.
    """

    def __init__(self, config: DecoderConfig, delta: GatedDeltaConfig, policy: DtypePolicy) -> None:
        d, heads, plain = config.hidden_size, delta.num_value_heads, policy.unquantized
        width = heads * delta.value_dim
        if delta.is_fused:
            self.in_proj_qkvz = Linear(delta.num_channels + width, d, (None, "embed"), policy)
            self.in_proj_ba = Linear(2 * heads, d, (None, "embed"), plain)
        else:
            self.in_proj_qkv = Linear(delta.num_channels, d, (None, "embed"), policy)
            self.in_proj_z = Linear(width, d, ("delta_heads", "embed"), policy)
            self.in_proj_b = Linear(heads, d, ("delta_heads", "embed"), plain)
            self.in_proj_a = Linear(heads, d, ("delta_heads", "embed"), plain)
        self.conv1d = DepthwiseConv(delta.num_channels, delta.num_taps, policy, bias=False)
        self.dt_bias = parameter((heads,), ("delta_heads",), jnp.dtype(jnp.float32))
        self.A_log = parameter((heads,), ("delta_heads",), jnp.dtype(jnp.float32))
        self.norm = RMSNorm(delta.value_dim, config.norm_eps, policy)
        self.out_proj = Linear(d, width, ("embed", "delta_heads"), policy)
        self.delta, self.rules = delta, policy.rules

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, Array, Array], Array]:
        """Return queries, keys and values side by side before the convolution, both rates of each value head, and the gates."""
        qkv, z, b, a = self._fused(x, tokens) if self.delta.is_fused else self._separate(x, tokens)
        return (qkv, b, a), z

    def recur(
        self, inputs: tuple[Array, Array, Array], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T N V"], RecurrentState]:
        """Return what attention reads, and the state after each row's last token."""
        qkv, b, a = inputs
        delta, count = self.delta, len(qkv)
        with jax.named_scope("short_conv"):
            mixed, windows = self.conv1d(qkv, state.windows, segments)
        mixed = jax.nn.silu(mixed).astype(qkv.dtype)
        width = delta.num_key_heads * delta.key_dim
        q, k = (part.reshape(count, -1, delta.key_dim) for part in (mixed[:, :width], mixed[:, width : 2 * width]))
        v = mixed[:, 2 * width :].reshape(count, -1, delta.value_dim)
        log_decay = -jnp.exp(self.A_log[...]) * jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...])
        assert state.states is not None, "a gated delta net has a state"
        with jax.named_scope("linear_attention"):
            whole = (_unit(q) * delta.key_dim**-0.5, _unit(k), v)
            by_head = (log_decay, jax.nn.sigmoid(b), state.states)
            operands = [(whole, ()), *((each, _BY_HEAD) for each in by_head), (segments, ())]
            made, states = sharded(self._attend, operands, _BY_HEAD, self.rules)  # (T, N, V)
        return made.astype(qkv.dtype), RecurrentState(windows, states)

    def finish(self, made: Float[Array, "T N V"], rest: Float[Array, "T NV"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        normed = self.norm(made) * jax.nn.silu(rest.reshape(made.shape).astype(jnp.float32))
        return self.out_proj(normed.astype(made.dtype).reshape(len(made), -1), tokens)

    def _attend(self, whole: tuple[Array, ...], *rest: Any) -> tuple[Array, Array]:
        """Attend with this device's heads of the queries, keys and values of all: XLA would exchange parts of them."""
        axes = self.rules.mesh_axes("delta_heads") if has_mesh() else ()

        def own(x: Float[Array, "T heads _"]) -> Float[Array, "T own _"]:
            size = x.shape[1] // jax.lax.axis_size(axes)
            return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, 1)

        q, k, v = map(own, whole) if axes else whole
        return linear_attention(q, k, v, *rest)

    def _separate(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[Array, Array, Array, Array]:
        return (
            self.in_proj_qkv(x, tokens),
            self.in_proj_z(x, tokens),
            self.in_proj_b(x, tokens),
            self.in_proj_a(x, tokens),
        )

    def _fused(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[Array, Array, Array, Array]:
        """Split the outputs of each key head: its query, its key, and the values and gates of its value heads."""
        delta, count, heads = self.delta, len(x), self.delta.num_key_heads
        width, group = delta.num_value_heads * delta.value_dim // heads, delta.num_value_heads // heads
        whole = self.in_proj_qkvz(x, tokens).reshape(count, heads, -1)
        ends = (delta.key_dim, 2 * delta.key_dim, 2 * delta.key_dim + width)
        q, k, v, z = (part.reshape(count, -1) for part in jnp.split(whole, ends, -1))
        rates = self.in_proj_ba(x, tokens).reshape(count, heads, -1)
        b, a = (part.reshape(count, -1) for part in jnp.split(rates, (group,), -1))
        return jnp.concatenate([q, k, v], -1), z, b, a


def _unit(x: Float[Array, "T K H"]) -> Float[Array, "T K H"]:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + _EPS)
