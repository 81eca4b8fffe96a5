"""The queries, keys and values of compressed convolutional attention (arXiv 2510.04476)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.states import PooledStates
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens, apply_together
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, Parameters, RecurrentState, convolve
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import ConvolvedQKVConfig


class ConvolvedQKV(nnx.Module):
    """Project queries and keys, convolve each channel, then the channels of each head, and add the means of each query and its
    key. Half of the values are those of the token before.

    Every device of a mesh computes all heads.
    """

    def __init__(self, config: DecoderConfig, qkv: ConvolvedQKVConfig, policy: DtypePolicy) -> None:
        d, (channels, half) = config.hidden_size, qkv.part_channels
        rows = (None, "embed")
        self.q_proj = Linear(qkv.num_heads * qkv.head_dim, d, rows, policy)
        self.k_proj = Linear(2 * half, d, rows, policy)
        self.v_proj_current = Linear(half, d, rows, policy)
        self.v_proj_delayed = Linear(half, d, rows, policy)
        self.conv_qk_depthwise = DepthwiseConv(channels, qkv.num_depthwise_taps, policy, bias=True)
        self.conv_qk_grouped = GroupedConv(channels, qkv.head_dim, qkv.num_grouped_taps, policy)
        self.qkv, self.rules = qkv, policy.rules
        self.head_axis: str | None = None
        self.backend, self.takes_tokens_in_turn = policy.backend, True

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array], tuple[Array, Array, Array]]:
        """Return what the window holds, and the projected queries and keys and the values of the tokens themselves."""
        parts = self.q_proj, self.k_proj, self.v_proj_current, self.v_proj_delayed
        query, key, current, delayed = apply_together(parts, x, tokens)
        return (jnp.concatenate([query, key, delayed], -1),), (query, key, current)

    @property
    def parameters(self) -> Parameters:
        """The taps and biases of both convolutions."""
        return (*self.conv_qk_depthwise.parameters, self.conv_qk_grouped.weight[...], self.conv_qk_grouped.bias[...])

    def recur(
        self, parameters: Parameters, inputs: tuple[Array, ...], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T _"], RecurrentState]:
        """Return convolved queries and keys, and late values, and the windows after each row's last token."""
        (taps, bias, grouped, grouped_bias), (x,), qkv = parameters, inputs, self.qkv
        num_late, half = qkv.num_grouped_taps - 1, qkv.part_channels[1]
        biases = jnp.pad(bias, (0, half))
        summed: Array | None = None
        for late in range(num_late, -1, -1):  # tokens before the token itself; it comes last, and writes the window
            own = jnp.pad(taps, ((0, half), (0, 0), (num_late - late, late)))
            before = state.windows
            if late and isinstance(before, PooledStates):
                before = before._replace(writes=None)
            if not late:
                own = own.at[-half:, :, -2].set(1)
            (made, values), windows = convolve(
                own, biases, x, before, segments, self.backend, sizes=qkv.part_channels, is_silu=False
            )
            heads = made.reshape(len(x), -1, qkv.head_dim)
            weight = grouped[..., num_late - late].reshape(-1, qkv.head_dim, qkv.head_dim)
            precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            part = jnp.einsum(
                "tgi,goi->tgo", heads, weight, precision=precision, preferred_element_type=jnp.dtype(jnp.float32)
            )
            summed = part if summed is None else summed + part
        assert summed is not None, "a convolution has taps"
        mixed = (summed.reshape(len(x), -1) + grouped_bias.astype(jnp.float32)).astype(x.dtype)
        return jnp.concatenate([mixed, values], -1), RecurrentState(windows)

    def finish(
        self, made: Float[Array, "T _"], rest: tuple[Array, Array, Array], tokens: Tokens
    ) -> Float[Array, "T _"]:
        """Return queries, keys and values side by side."""
        query, key, current = rest
        qkv, count = self.qkv, len(made)
        heads = key.reshape(count, qkv.num_kv_heads, 1, qkv.head_dim)
        queries = (query.reshape(count, qkv.num_kv_heads, -1, qkv.head_dim) + heads) * 0.5
        means = jnp.concatenate([queries.reshape(count, -1), queries.mean(2).reshape(count, -1)], -1)
        mixed, late = jnp.split(made, (qkv.part_channels[0],), -1)
        return jnp.concatenate([mixed + means, current, late], -1)


class GroupedConv(nnx.Module):
    """The parameters of a causal convolution of the channels of each head, with torch's `Conv1d` names."""

    def __init__(self, num_channels: int, head_dim: int, num_taps: int, policy: DtypePolicy) -> None:
        self.weight = parameter((num_channels, head_dim, num_taps), (None, None, None), policy.vectors)
        self.bias = parameter((num_channels,), (None,), policy.vectors)
