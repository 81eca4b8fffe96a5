"""Lightning attention (MiniMax-01, arXiv 2501.08313)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.linear_attention import linear_attention, takes_tokens_in_turn
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear, Tokens, apply_together
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent import Parameters, RecurrentState
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.recurrent import LightningConfig

_HEADS = "delta_heads"


class LightningAttention(nnx.Module):
    """Add k v^T to a state that decays by a constant of its head, read it with q, then norm over all heads, gate and project.

    The devices of a mesh share the heads. The rows of `in_proj` are each head's query, key and value.
    """

    def __init__(self, config: DecoderConfig, lightning: LightningConfig, policy: DtypePolicy) -> None:
        d, width = config.hidden_size, lightning.width
        self.in_proj = Linear(3 * width, d, (_HEADS, "embed"), policy)
        self.output_gate = Linear(width, d, (_HEADS, "embed"), policy)
        self.norm = RMSNorm(width, lightning.norm_eps, policy)
        self.out_proj = Linear(d, width, ("embed", _HEADS), policy)
        self.lightning, self.rules, self.head_axis = lightning, policy.rules, _HEADS
        self.backend, dim = policy.backend, lightning.head_dim
        self.takes_tokens_in_turn = takes_tokens_in_turn(policy.backend, dim, dim)

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array], Array]:
        """Return queries, keys and values by head, and the gates."""
        qkv, gates = apply_together((self.in_proj, self.output_gate), x, tokens)
        return (qkv,), gates

    @property
    def parameters(self) -> Parameters:
        """The logarithm of each head's decay."""
        heads = np.arange(1, self.lightning.num_heads + 1)
        slopes = 2.0 ** (-8 * heads / self.lightning.num_heads)
        return (jnp.asarray(-self.lightning.decay_scale * slopes, jnp.float32),)

    def recur(
        self, parameters: Parameters, inputs: tuple[Array], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T N H"], RecurrentState]:
        """Return what attention reads, and the state after each row's last token, for one device's heads."""
        (log_decays,), (qkv,) = parameters, inputs
        assert state.states is not None, "lightning attention has a state"
        activated = ACTIVATIONS[self.lightning.activation](qkv).astype(jnp.float32)
        q, k, v = jnp.split(activated.reshape(len(qkv), -1, 3 * self.lightning.head_dim), 3, -1)
        with jax.named_scope("linear_attention"):
            decays = jnp.broadcast_to(log_decays, q.shape[:2])
            made, states = linear_attention(q, k, v, decays, None, state.states, segments, backend=self.backend)
        return made.astype(qkv.dtype), RecurrentState(None, states)

    def finish(self, made: Float[Array, "T N H"], rest: Float[Array, "T NH"], tokens: Tokens) -> Float[Array, "T D"]:
        """Return the outputs. rest: the gates."""
        normed = self.norm(made.reshape(len(made), -1))
        return self.out_proj(jax.nn.sigmoid(rest) * normed, tokens)
