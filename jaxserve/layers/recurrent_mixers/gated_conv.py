"""The gated short convolution of LFM2 (arXiv 2511.23404)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import DepthwiseConv, Parameters, RecurrentState, convolve
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import ShortConvConfig


class GatedConv(nnx.Module):
    """Compute project(c * convolve(b * x)), with b, c and x projected from the input."""

    def __init__(self, config: DecoderConfig, conv: ShortConvConfig, policy: DtypePolicy) -> None:
        d = config.hidden_size
        self.in_proj = Linear(3 * d, d, (None, "embed"), policy, bias=conv.has_bias)
        self.conv = DepthwiseConv(d, conv.num_taps, policy, bias=conv.has_bias)
        self.o_proj = Linear(d, d, ("embed", None), policy, bias=conv.has_bias)
        self.rules, self.head_axis = policy.rules, None
        self.backend = policy.backend
        self.takes_tokens_in_turn = True

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Float[Array, "T D"]], Float[Array, "T D"]]:
        """Return the inputs of the convolution, and the gates of its sums."""
        b, c, inner = jnp.split(self.in_proj(x, tokens), 3, -1)
        return (b * inner,), c

    @property
    def parameters(self) -> Parameters:
        """The taps and the bias of the convolution."""
        return self.conv.parameters

    def recur(
        self, parameters: Parameters, inputs: tuple[Float[Array, "T D"]], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T D"], RecurrentState]:
        """Return the convolution's sums, and the windows after each row's last token."""
        taps, bias = parameters
        (mixed,), windows = convolve(taps, bias, *inputs, state.windows, segments, self.backend, is_silu=False)
        return mixed, RecurrentState(windows)

    def finish(self, made: Float[Array, "T D"], rest: Float[Array, "T D"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        return self.o_proj(rest * made, tokens)
