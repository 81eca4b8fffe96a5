"""Gated delta nets (Yang et al., arXiv 2412.06464) of Qwen3-Next, Qwen3.5 and OLMo Hybrid, and Kimi delta attention (arXiv 2510.26692)."""

from __future__ import annotations

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.linear_attention import linear_attention, takes_tokens_in_turn
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Float

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens, apply_together
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.param import FusedLayout, parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, Parameters, RecurrentState, convolve
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import GatedDeltaConfig, KimiDeltaConfig
from jaxserve.sharding.rules import AxisRules
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
        if delta.inputs == "apart":
            counts = dict(zip(("q_proj", "k_proj", "v_proj"), delta.part_channels, strict=True))
            make = partial(Linear, in_dim=d, axes=rows, policy=policy)
            self.qkv_proj = FusedLinear(counts, make, policy, num_units=delta.num_key_heads)
            self.g_proj = Linear(width, d, rows, policy)
            self.b_proj = Linear(heads, d, rows, plain)
            self.a_proj = Linear(heads, d, rows, plain)
        elif delta.inputs == "by_head":
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
        self.norm = RMSNorm(delta.value_dim, delta.norm_eps or config.norm_eps, policy)
        out = Linear(d, width, ("embed", _HEADS), policy)
        if delta.inputs == "apart":
            self.o_proj = out
        else:
            self.out_proj = out
        self.delta, self.rules, self.head_axis = delta, policy.rules, _HEADS
        self.backend = policy.backend
        self.takes_tokens_in_turn = takes_tokens_in_turn(policy.backend, delta.key_dim, delta.value_dim)

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, Array, Array], Array]:
        """Return queries, keys and values side by side before the convolution, both rates of each value head, and the gates."""
        kinds = {"by_head": self._by_head, "by_part": self._by_part, "apart": self._apart}
        qkv, z, b, a = kinds[self.delta.inputs](x, tokens)
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
        sizes = self.channels.sizes
        (q, k, v), windows = convolve(taps, None, qkv, state.windows, segments, self.backend, sizes=sizes)
        q, k = (part.reshape(len(qkv), -1, delta.key_dim) for part in (q, k))
        log_decay = -jnp.exp(log_rates) * jax.nn.softplus(a.astype(jnp.float32) + biases)
        rate = jax.nn.sigmoid(b)
        with jax.named_scope("linear_attention"):
            made, states = linear_attention(
                q,
                k,
                v.reshape(len(qkv), -1, delta.value_dim),
                log_decay,
                rate if delta.rate_scale == 1 else rate * delta.rate_scale,
                state.states,
                segments,
                norm_eps=_EPS,
                backend=self.backend,
            )
        return made.astype(qkv.dtype), RecurrentState(windows, states)

    def finish(self, made: Float[Array, "T N V"], rest: Float[Array, "T NV"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        gate = jax.nn.silu if self.delta.gate == "silu" else jax.nn.sigmoid
        normed = self.norm(made) * gate(rest.reshape(made.shape).astype(jnp.float32))
        out = self.o_proj if self.delta.inputs == "apart" else self.out_proj
        return out(normed.astype(made.dtype).reshape(len(made), -1), tokens)

    def _apart(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[Array, Array, Array, Array]:
        qkv = _side_by_side(self.qkv_proj(x, tokens), self.rules)
        z, b, a = apply_together((self.g_proj, self.b_proj, self.a_proj), x, tokens)
        return qkv, z, b, a

    def _by_part(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[Array, Array, Array, Array]:
        parts = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        qkv, z, b, a = apply_together(parts, x, tokens)
        return qkv, z, b, a

    def _by_head(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[Array, Array, Array, Array]:
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


class KimiDelta(nnx.Module):
    """A gated delta net whose decays differ by channel of the key, and whose decays and gates may come from low-rank projections.

    The devices of a mesh share the heads as in `GatedDeltaNet`.
    """

    def __init__(self, config: DecoderConfig, delta: KimiDeltaConfig, policy: DtypePolicy) -> None:
        d, width, rank = config.hidden_size, delta.width, delta.head_dim
        rows = (_HEADS, "embed")
        make = partial(Linear, in_dim=d, axes=rows, policy=policy)
        self.qkv_proj = FusedLinear(
            dict.fromkeys(("q_proj", "k_proj", "v_proj"), width), make, policy, num_units=delta.num_heads
        )
        if delta.is_low_rank:
            self.f_a_proj = Linear(rank, d, (None, "embed"), policy)
            self.f_b_proj = Linear(width, rank, (_HEADS, None), policy)
            self.g_a_proj = Linear(rank, d, (None, "embed"), policy)
            self.g_b_proj = Linear(width, rank, (_HEADS, None), policy)
        else:
            self.f_proj, self.g_proj = make(width), make(width)
        self.b_proj = Linear(delta.num_heads, d, rows, policy.unquantized)
        conv = partial(DepthwiseConv, width, delta.num_taps, policy, bias=False, axis=_HEADS)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = conv(), conv(), conv()
        self.dt_bias = parameter((width,), (_HEADS,), jnp.dtype(jnp.float32))
        self.A_log = parameter((delta.num_heads,), (_HEADS,), jnp.dtype(jnp.float32))
        self.norm = RMSNorm(delta.head_dim, config.norm_eps, policy, "wide")
        self.o_proj = Linear(d, width, ("embed", _HEADS), policy)
        self.delta, self.rules, self.head_axis = delta, policy.rules, _HEADS
        self.backend, dim = policy.backend, delta.head_dim
        self.takes_tokens_in_turn = takes_tokens_in_turn(policy.backend, dim, dim, is_by_channel=True)

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, Array, Array], Array]:
        """Return queries, keys and values side by side before the convolution, the rate of each head, the decay of each
        channel before its bias, and the gates."""
        qkv = _side_by_side(self.qkv_proj(x, tokens), self.rules)
        if not self.delta.is_low_rank:
            decays, gates, b = apply_together((self.f_proj, self.g_proj, self.b_proj), x, tokens)
            return (qkv, b, decays), gates
        decays, gates, b = apply_together((self.f_a_proj, self.g_a_proj, self.b_proj), x, tokens)
        return (qkv, b, self.f_b_proj(decays, tokens)), self.g_b_proj(gates, tokens)

    @property
    def parameters(self) -> Parameters:
        """The taps of each convolution, the rate of each head's decays, and the bias of each channel's."""
        taps = (conv.weight[...] for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        return *taps, self.A_log[...], self.dt_bias[...]

    def recur(
        self, parameters: Parameters, inputs: tuple[Array, Array, Array], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T N V"], RecurrentState]:
        """Return what attention reads, and the state after each row's last token, for one device's heads."""
        (*taps, log_rates, biases), (qkv, b, decays) = parameters, inputs
        assert state.states is not None, "Kimi delta attention has a state"
        sizes = [qkv.shape[1] // 3] * 3
        mixed, windows = convolve(jnp.concatenate(taps), None, qkv, state.windows, segments, self.backend, sizes=sizes)
        q, k, v = (part.reshape(len(qkv), -1, self.delta.head_dim) for part in mixed)
        steps = (decays.astype(jnp.float32) + biases).reshape(q.shape)
        rates = jnp.exp(log_rates)[:, None]
        bound = self.delta.decay_bound
        log_decay = -rates * jax.nn.softplus(steps) if bound is None else bound * jax.nn.sigmoid(rates * steps)
        with jax.named_scope("linear_attention"):
            made, states = linear_attention(
                q,
                k,
                v,
                log_decay,
                jax.nn.sigmoid(b),
                state.states,
                segments,
                norm_eps=_EPS,
                backend=self.backend,
            )
        return made.astype(qkv.dtype), RecurrentState(windows, states)

    def finish(self, made: Float[Array, "T N V"], rest: Float[Array, "T NV"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        normed = self.norm(made).astype(jnp.float32) * jax.nn.sigmoid(rest.reshape(made.shape).astype(jnp.float32))
        return self.o_proj(normed.astype(made.dtype).reshape(len(made), -1), tokens)


def _side_by_side(parts: list[Float[Array, "T _"]], rules: AxisRules) -> Float[Array, "T _"]:
    """Return the channels of queries, then keys, then values, of each device's heads."""

    def joined(*parts: Float[Array, "T _"]) -> Float[Array, "T _"]:
        return jnp.concatenate(parts, -1)

    return sharded(joined, [(part, _BY_HEAD) for part in parts], _BY_HEAD, rules)
