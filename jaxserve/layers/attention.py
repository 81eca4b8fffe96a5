"""Grouped-query attention over the paged KV pool."""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx
from jaxserve_kernels.paged_attention import Paging, Scoring, write_and_attend
from jaxserve_kernels.rope import Rotation
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Linear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.numerics import Numerics
from jaxserve.models.config import DecoderConfig, LayerConfig


class KVPool(NamedTuple):
    """Keys and values of all layers. Donated to every step and returned by it: the same buffers."""

    k: Float[Array, "L P K S H"]
    v: Float[Array, "L P K S H"]


class StepContext(NamedTuple):
    """What every layer needs to know of the step's tokens."""

    rotation: Rotation
    paging: Paging

    @property
    def num_tokens(self) -> Int[Array, ""]:
        """Tokens that are not padding: they come first."""
        return self.paging.query_starts[-1]


class Attention(nnx.Module):
    """Projections, optional per-head norms, rotation with KV write and attention, output projection."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, numerics: Numerics) -> None:
        d, h = config.hidden_size, config.head_dim
        n, k = config.num_heads, config.num_kv_heads
        self.q_proj = Linear(n * h, d, ("heads", "embed"), numerics, bias=config.qkv_bias)
        self.k_proj = Linear(k * h, d, ("kv_heads", "embed"), numerics, bias=config.qkv_bias)
        self.v_proj = Linear(k * h, d, ("kv_heads", "embed"), numerics, bias=config.qkv_bias)
        self.o_proj = Linear(d, n * h, ("embed", "heads"), numerics, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(h, config.norm_eps, numerics) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.norm_eps, numerics) if config.qk_norm else None
        self.layer = layer
        self.shape = (n, k, h)
        self.backend = numerics.backend

    def __call__(
        self, x: Float[Array, "T D"], pool: KVPool, index: Int[Array, ""], step: StepContext
    ) -> tuple[Float[Array, "T D"], KVPool]:
        n, k, h = self.shape
        query = self.q_proj(x, step.num_tokens).reshape(-1, n, h)
        key = self.k_proj(x, step.num_tokens).reshape(-1, k, h)
        value = self.v_proj(x, step.num_tokens).reshape(-1, k, h)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        with jax.named_scope("paged_attention"):
            attended, *pages = write_and_attend(
                query,
                key,
                value,
                *pool,
                index,
                step.paging,
                rotation=step.rotation if self.layer.use_rope else None,
                scoring=Scoring(scale=h**-0.5, sliding_window=self.layer.sliding_window),
                backend=self.backend,
            )  # (T, N, H)
        return self.o_proj(attended.reshape(-1, n * h), step.num_tokens), KVPool(*pages)
