"""The gated delta net of Qwen3-Next and Qwen3.5 (Yang et al., arXiv 2412.06464)."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.linear_attention import linear_attention, takes_tokens_in_turn
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.param import FusedLayout, parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, Parameters, RecurrentState, convolve
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import GatedDeltaConfig
from jaxserve.sharding.shard_map import sharded

_HEADS: Final = "delta_heads"
"""Key heads, each with the value heads that it serves, and their channels."""
_BY_HEAD: Final = (None, _HEADS)
"""Axes of tokens by head or channel."""
_EPS = 1e-6
"""Added to the squared length of queries and keys before they are divided by it."""


class GatedDeltaNet(nnx.Module):
    """Convolve queries, keys and values, attend by the gated delta rule, then norm, gate and project each value head.

    The devices of a mesh share the heads from the input projections to the output projection, with the channels of the
    convolution, the windows and the states. If n devices do, the rows of queries, keys and values are in n groups, each with the
    queries, keys and values of one device; the checkpoint has those of all queries first.
    """

    def __init__(self, config: DecoderConfig, delta: GatedDeltaConfig, policy: DtypePolicy) -> None:
        d, heads, plain = config.hidden_size, delta.num_value_heads, policy.unquantized
        width, rows = heads * delta.value_dim, (_HEADS, "embed")
        self.channels = FusedLayout(delta.part_channels, policy.rules.count(_HEADS))
        layout = self.channels if self.channels.groups > 1 else None
        if delta.is_fused:
            self.in_proj_qkvz = Linear(delta.num_channels + width, d, rows, policy)
            self.in_proj_ba = Linear(2 * heads, d, rows, plain)
        else:
            self.in_proj_qkv = Linear(delta.num_channels, d, rows, policy, layout=layout)
            self.in_proj_z = Linear(width, d, rows, policy)
            self.in_proj_b = Linear(heads, d, rows, plain)
            self.in_proj_a = Linear(heads, d, rows, plain)
        self.conv1d = DepthwiseConv(delta.num_channels, delta.num_taps, policy, bias=False, axis=_HEADS, layout=layout)
        self.dt_bias = parameter((heads,), (_HEADS,), jnp.dtype(jnp.float32))
        self.A_log = parameter((heads,), (_HEADS,), jnp.dtype(jnp.float32))
        self.norm = RMSNorm(delta.value_dim, config.norm_eps, policy)
        self.out_proj = Linear(d, width, ("embed", _HEADS), policy)
        self.delta, self.rules, self.head_axis = delta, policy.rules, _HEADS
        self.backend = policy.backend
        self.takes_tokens_in_turn = takes_tokens_in_turn(policy.backend, delta.key_dim, delta.value_dim)

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, Array, Array], Array]:
        """Return queries, keys and values side by side before the convolution, both rates of each value head, and the gates."""
        qkv, z, b, a = self._fused(x, tokens) if self.delta.is_fused else self._separate(x, tokens)
        return (qkv, b, a), z

    @property
    def parameters(self) -> tuple[Array, Array, Array]:
        """The taps of the convolution, and the rate and the bias of each value head's decay."""
        return self.conv1d.weight[...], self.A_log[...], self.dt_bias[...]

    def recur(
        self, parameters: Parameters, inputs: tuple[Array, Array, Array], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T N V"], RecurrentState]:
        """Return what attention reads, and the state after each row's last token, for one device's heads."""
        (taps, log_rates, biases), (qkv, b, a), delta = parameters, inputs, self.delta
        assert state.states is not None, "a gated delta net has a state"
        mixed, windows = convolve(taps, None, qkv, state.windows, segments)
        q, k, v = self.channels.split(jax.nn.silu(mixed).astype(qkv.dtype))
        q, k = (part.reshape(len(qkv), -1, delta.key_dim) for part in (q, k))
        log_decay = -jnp.exp(log_rates) * jax.nn.softplus(a.astype(jnp.float32) + biases)
        with jax.named_scope("linear_attention"):
            made, states = linear_attention(
                _unit(q) * delta.key_dim**-0.5,
                _unit(k),
                v.reshape(len(qkv), -1, delta.value_dim),
                log_decay,
                jax.nn.sigmoid(b),
                state.states,
                segments,
                backend=self.backend,
            )
        return made.astype(qkv.dtype), RecurrentState(windows, states)

    def finish(self, made: Float[Array, "T N V"], rest: Float[Array, "T NV"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        normed = self.norm(made) * jax.nn.silu(rest.reshape(made.shape).astype(jnp.float32))
        return self.out_proj(normed.astype(made.dtype).reshape(len(made), -1), tokens)

    def _separate(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[Array, Array, Array, Array]:
        return (
            self.in_proj_qkv(x, tokens),
            self.in_proj_z(x, tokens),
            self.in_proj_b(x, tokens),
            self.in_proj_a(x, tokens),
        )

    def _fused(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[Array, Array, Array, Array]:
        """Split the outputs of each key head: its query, its key, and the values and gates of its value heads."""
        delta = self.delta
        group = delta.num_value_heads // delta.num_key_heads
        width = group * delta.value_dim
        ends = (delta.key_dim, 2 * delta.key_dim, 2 * delta.key_dim + width)

        def by_part(qkvz: Float[Array, "T _"], ba: Float[Array, "T _"]) -> tuple[Array, Array, Array, Array]:
            count = len(qkvz)
            whole = qkvz.reshape(count, -1, ends[-1] + width)  # this device's key heads
            q, k, v, z = (part.reshape(count, -1) for part in jnp.split(whole, ends, -1))
            rates = ba.reshape(count, -1, 2 * group)
            b, a = (part.reshape(count, -1) for part in jnp.split(rates, (group,), -1))
            return jnp.concatenate([q, k, v], -1), z, b, a

        operands = [(self.in_proj_qkvz(x, tokens), _BY_HEAD), (self.in_proj_ba(x, tokens), _BY_HEAD)]
        return sharded(by_part, operands, _BY_HEAD, self.rules)


def _unit(x: Float[Array, "T K H"]) -> Float[Array, "T K H"]:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + _EPS)
