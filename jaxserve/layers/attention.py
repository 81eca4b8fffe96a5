"""Grouped-query attention over the paged KV pool."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.paged_attention import Ragged, decode_attention, mixed_attention
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Linear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import Rotation, rotate
from jaxserve.models.config import DecoderConfig, LayerConfig


class KVPool(NamedTuple):
    """Keys and values of all layers. Donated to every step and returned by it: the same buffers."""

    k: Float[Array, "L P K S H"]
    v: Float[Array, "L P K S H"]


class StepContext(NamedTuple):
    """What every layer needs to know of the step's tokens."""

    rotation: Rotation
    pages: Int[Array, "T"]
    """Page and slot that each token's key and value go to."""
    slots: Int[Array, "T"]
    block_tables: Int[Array, "B M"]
    kv_lengths: Int[Array, "B"]
    """Keys each row has once this step's are written."""
    ragged: Ragged | None
    """None: one token per row, token i belongs to row i."""


class Attention(nnx.Module):
    """Projections, optional per-head norms, rotation, KV write, attention, output projection."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, dtype: jnp.dtype) -> None:
        d, h = config.hidden_size, config.head_dim
        n, k = config.num_heads, config.num_kv_heads
        self.q_proj = Linear(n * h, d, ("heads", "embed"), dtype, bias=config.qkv_bias)
        self.k_proj = Linear(k * h, d, ("kv_heads", "embed"), dtype, bias=config.qkv_bias)
        self.v_proj = Linear(k * h, d, ("kv_heads", "embed"), dtype, bias=config.qkv_bias)
        self.o_proj = Linear(d, n * h, ("embed", "heads"), dtype, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(h, config.norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.norm_eps, dtype) if config.qk_norm else None
        self.layer = layer
        self.shape = (n, k, h)

    def __call__(
        self, x: Float[Array, "T D"], pool: KVPool, index: Int[Array, ""], step: StepContext
    ) -> tuple[Float[Array, "T D"], KVPool]:
        n, k, h = self.shape
        query = self.q_proj(x).reshape(-1, n, h)
        key = self.k_proj(x).reshape(-1, k, h)
        value = self.v_proj(x).reshape(-1, k, h)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.layer.use_rope:
            query, key = rotate(query, step.rotation), rotate(key, step.rotation)
        with jax.named_scope("kv_write"):
            pool = KVPool(*kv_write(pool.k, pool.v, index, key, value, step.pages, step.slots))
        with jax.named_scope("paged_attention"):
            attended = self._attend(query, pool, index, step)  # (T, N, H)
        return self.o_proj(attended.reshape(-1, n * h)), pool

    def _attend(
        self, query: Float[Array, "T N H"], pool: KVPool, index: Int[Array, ""], step: StepContext
    ) -> Float[Array, "T N H"]:
        scale, window = self.shape[2] ** -0.5, self.layer.sliding_window
        where = (pool.k, pool.v, index, step.block_tables, step.kv_lengths)
        if step.ragged is None:
            return decode_attention(query, *where, scale=scale, sliding_window=window)
        return mixed_attention(query, *where, step.ragged, scale=scale, sliding_window=window)
