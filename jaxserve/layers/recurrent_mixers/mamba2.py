"""The Mamba-2 mixer (Dao & Gu, arXiv 2405.21060)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.linear_attention import linear_attention, takes_tokens_in_turn
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, Parameters, RecurrentState, convolve
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import Mamba2Config


class Mamba2(nnx.Module):
    """Convolve x, B and C, add dt x B^T to a decaying state, read it with C, then gate, norm and project.

    Every device of a mesh computes all heads.
    """

    def __init__(self, config: DecoderConfig, mamba: Mamba2Config, policy: DtypePolicy) -> None:
        d, width, single = config.hidden_size, mamba.width, jnp.dtype(jnp.float32)
        rows = width + mamba.num_channels + mamba.num_heads
        self.in_proj = Linear(rows, d, (None, "embed"), policy, bias=mamba.has_bias)
        self.conv1d = DepthwiseConv(mamba.num_channels, mamba.num_taps, policy, bias=mamba.has_conv_bias)
        self.dt_bias = parameter((mamba.num_heads,), (None,), single)
        self.A_log = parameter((mamba.num_heads,), (None,), single)
        self.D = parameter((mamba.num_heads,), (None,), single)
        self.norm = None if mamba.norm == "none" else GroupNorm(mamba, config.norm_eps, policy)
        self.out_proj = Linear(d, width, ("embed", None), policy, bias=mamba.has_bias)
        self.mamba, self.rules, self.head_axis = mamba, policy.rules, None
        self.backend = policy.backend
        self.takes_tokens_in_turn = takes_tokens_in_turn(policy.backend, mamba.state_dim, mamba.head_dim)

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, Array], Array]:
        """Return x, B and C side by side before the convolution, the steps dt, and the gates."""
        mamba = self.mamba
        width, shared = mamba.width, mamba.num_groups * mamba.state_dim
        projected = self.in_proj(x, tokens)
        if any(scale != 1 for scale in mamba.scales):
            sizes = (width, width, shared, shared, mamba.num_heads)
            projected = projected * jnp.asarray(np.repeat(mamba.scales, sizes), projected.dtype)
        z, xbc, dt = jnp.split(projected, (width, width + mamba.num_channels), -1)
        return (xbc, dt), z

    @property
    def parameters(self) -> Parameters:
        """The taps and the bias of the convolution, and by head the rate of decay, the bias of dt, and the factor on inputs."""
        return *self.conv1d.parameters, self.A_log[...], self.dt_bias[...], self.D[...]

    def recur(
        self, parameters: Parameters, inputs: tuple[Array, Array], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T W"], RecurrentState]:
        """Return what is read from the states, in float32, and the state after each row's last token."""
        (taps, bias, log_rates, dt_bias, factors), (xbc, dt) = parameters, inputs
        assert state.states is not None, "Mamba-2 has a state"
        mamba, count = self.mamba, len(xbc)
        width, shared = mamba.width, mamba.num_groups * mamba.state_dim
        sizes = (width, shared, shared)
        mixed, windows = convolve(taps, bias, xbc, state.windows, segments, self.backend, sizes=sizes)
        inner, b, c = (part.astype(jnp.float32) for part in mixed)
        inner = inner.reshape(count, mamba.num_heads, -1)  # (T, N, V)
        b, c = (part.reshape(count, mamba.num_groups, -1) for part in (b, c))
        steps = jax.nn.softplus(dt.astype(jnp.float32) + dt_bias)
        steps = jnp.clip(steps, mamba.min_step, mamba.max_step)  # (T, N)
        with jax.named_scope("linear_attention"):
            log_decay = -jnp.exp(log_rates) * steps
            made, states = linear_attention(
                c, b, inner * steps[..., None], log_decay, None, state.states, segments, backend=self.backend
            )
        return (made + factors[:, None] * inner).reshape(count, -1), RecurrentState(windows, states)

    def finish(self, made: Float[Array, "T W"], rest: Float[Array, "T W"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        out = self.out_proj(self._gated(made, rest).astype(rest.dtype), tokens)
        return out if self.mamba.out_scale == 1 else out * self.mamba.out_scale

    def _gated(self, made: Float[Array, "T W"], z: Float[Array, "T W"]) -> Float[Array, "T W"]:
        gate = jax.nn.silu(z.astype(jnp.float32))
        if self.norm is None:
            return made * gate
        return self.norm(made * gate) if self.mamba.norm == "gate_first" else self.norm(made) * gate


class GroupNorm(nnx.Module):
    """RMSNorm of each group of heads in float32."""

    def __init__(self, mamba: Mamba2Config, eps: float, policy: DtypePolicy) -> None:
        self.weight = parameter((mamba.width,), (None,), policy.vectors)
        self.num_groups, self.eps = mamba.num_groups, eps

    def __call__(self, x: Float[Array, "T W"]) -> Float[Array, "T W"]:
        grouped = x.reshape(len(x), self.num_groups, -1)
        scaled = grouped * jax.lax.rsqrt(jnp.mean(grouped * grouped, -1, keepdims=True) + self.eps)
        return self.weight[...].astype(jnp.float32) * scaled.reshape(x.shape)
