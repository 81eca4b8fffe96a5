"""The Mamba mixer, the first version (Gu & Dao, arXiv 2312.00752)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.selective_scan import Scanned, selective_scan
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import RMSNorm, normalized
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, Parameters, RecurrentState, convolve
from jaxserve.model_config.decoder import DecoderConfig, NormWeights
from jaxserve.model_config.recurrent import MambaConfig


class Mamba(nnx.Module):
    """Convolve x, project it to steps, B and C, scan it, then gate and project.

    Every device of a mesh computes all channels.
    """

    def __init__(self, config: DecoderConfig, mamba: MambaConfig, policy: DtypePolicy) -> None:
        d, width, single = config.hidden_size, mamba.num_channels, jnp.dtype(jnp.float32)
        self.in_proj = Linear(2 * width, d, (None, "embed"), policy, bias=mamba.has_bias)
        self.conv1d = DepthwiseConv(width, mamba.num_taps, policy, bias=mamba.has_conv_bias)
        self.x_proj = Linear(mamba.step_rank + 2 * mamba.state_dim, width, (None, None), policy)
        self.dt_proj = Linear(width, mamba.step_rank, (None, None), policy, bias=True)
        self.dt_proj.bias = parameter((width,), (None,), single)  # added in float32
        self.A_log = parameter((width, mamba.state_dim), (None, None), single)
        self.D = parameter((width,), (None,), single)
        self.norm_eps = mamba.norm_eps or config.norm_eps
        if mamba.norm != "none":
            weights: NormWeights = "plain" if mamba.norm == "plain" else "none"
            norm = partial(RMSNorm, eps=self.norm_eps, policy=policy, weights=weights)
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = map(
                norm, (mamba.step_rank, mamba.state_dim, mamba.state_dim)
            )
        self.out_proj = Linear(d, width, ("embed", None), policy, bias=mamba.has_bias)
        self.mamba, self.rules, self.head_axis = mamba, policy.rules, None
        self.backend, self.takes_tokens_in_turn = policy.backend, False

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, ...], Array]:
        """Return the inputs of the convolution with each token's adapters, if there are some, and the gates."""
        inner, z = jnp.split(self.in_proj(x, tokens), 2, -1)
        return (inner,) if tokens.adapters is None else (inner, tokens.adapters), z

    @property
    def parameters(self) -> Parameters:
        """The parameters of the convolution, of the projections from its sums and of their norms, and those of the channels."""
        norms = () if self.mamba.norm == "none" else (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        weights = tuple(None if norm.weight is None else norm.weight[...] for norm in norms)
        projections, bias = (self.x_proj.local, self.dt_proj.local), self.dt_proj.bias
        assert bias is not None, "steps have a bias"
        return self.conv1d.parameters, projections, weights, bias[...], self.A_log[...], self.D[...]

    def recur(
        self, parameters: Parameters, inputs: tuple[Array, ...], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T C"], RecurrentState]:
        """Return what is read from the states, in float32, and the state after each row's last token."""
        (taps, bias), (x_proj, dt_proj), weights, dt_bias, log_rates, factors = parameters
        assert state.states is not None, "Mamba has a state"
        mamba, tokens = self.mamba, Tokens(segments.starts[-1], *inputs[1:])
        (x,), windows = convolve(taps, bias, inputs[0], state.windows, segments, self.backend)
        sizes = mamba.step_rank, mamba.step_rank + mamba.state_dim
        parts = jnp.split(x_proj(x, tokens, self.backend).astype(x.dtype), sizes, -1)
        if weights:
            parts = [self._normed(part, weight) for part, weight in zip(parts, weights, strict=True)]
        steps, b, c = parts
        steps = dt_proj(steps, tokens, self.backend).astype(x.dtype).astype(jnp.float32)
        wide = x.astype(jnp.float32)
        scanned = Scanned(wide, jax.nn.softplus(steps + dt_bias), b.astype(jnp.float32), c.astype(jnp.float32))
        with jax.named_scope("selective_scan"):
            made, states = selective_scan(scanned, -jnp.exp(log_rates).T, state.states, segments, backend=self.backend)
        return made + factors * wide, RecurrentState(windows, states)

    def finish(self, made: Float[Array, "T C"], rest: Float[Array, "T C"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        gated = made * jax.nn.silu(rest.astype(jnp.float32))
        return self.out_proj(gated.astype(rest.dtype), tokens)

    def _normed(self, x: Float[Array, "T _"], weight: Float[Array, "_"] | None) -> Float[Array, "T _"]:
        scaled = normalized(x, self.norm_eps, is_alike=self.backend in NATIVE).astype(x.dtype)
        return scaled if weight is None else weight * scaled
