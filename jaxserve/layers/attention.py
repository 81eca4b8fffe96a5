"""Grouped-query attention over the paged KV pool."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.paged_attention import Paging, Scoring, ShardAxes, write_and_attend
from jaxserve_kernels.rope import Rotation, rotate
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Bool, Float

from jaxserve.layers.cache import Cache, GroupStep, KVPool, StateSlots, with_group
from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.cache import CachePlace, LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig


class StepContext(NamedTuple):
    """Positions, pages and adapters of the step's tokens, for every layer."""

    rotation: Rotation
    sliding_rotation: Rotation | None
    """Rotation in sliding-window layers; None: the same as in the others."""
    groups: tuple[GroupStep, ...]
    """Places of the tokens in each cache group. The first group has pages."""
    adapters: Bool[Array, "T A"] | None = None
    """See `Tokens.adapters`."""
    query_scales: Float[Array, "T"] | None = None
    """Factor on each token's queries; None: there is none."""
    segments: Segments | None = None
    """Rows for recurrent layers; None: there are none."""

    def rotation_of(self, layer: LayerConfig) -> Rotation | None:
        """Return the rotation of a layer's queries and keys; None without positional encoding."""
        if not layer.use_rope:
            return None
        if layer.sliding_window is not None and self.sliding_rotation is not None:
            return self.sliding_rotation
        return self.rotation

    @property
    def rows(self) -> Paging:
        """The rows of the step: `query_starts`, `kv_lengths` and `ragged` are the same in every group with pages."""
        rows = self.groups[0]
        assert isinstance(rows, Paging), "groups with pages come first"
        return rows

    @property
    def tokens(self) -> Tokens:
        """Number of real tokens, which come before padding, and their adapters."""
        return Tokens(self.rows.query_starts[-1], self.adapters)

    def paging(self, place: CachePlace) -> Paging:
        """Return the pages of the group of `place`."""
        paging = self.groups[place.group]
        assert isinstance(paging, Paging), "a group with pages"
        return paging

    def slots(self, place: CachePlace) -> StateSlots:
        """Return the state slots of the group of `place`."""
        slots = self.groups[place.group]
        assert isinstance(slots, StateSlots), "a state group"
        return slots


class Attention(nnx.Module):
    """Projections, optional per-head norms, rotation with KV write and attention, output projection."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy) -> None:
        d, h = config.hidden_size, config.head_dim
        n, k = config.num_heads, config.num_kv_heads
        self.has_output_gate = config.has_output_gate
        parts = {"q_proj": n * h * (2 if self.has_output_gate else 1), "k_proj": k * h, "v_proj": k * h}
        make = partial(Linear, in_dim=d, axes=("kv_heads", "embed"), policy=policy, bias=config.qkv_bias)
        self.qkv_proj = FusedLinear(parts, make, policy, num_units=k)
        self.o_proj = Linear(d, n * h, ("embed", "heads"), policy, bias=config.attention_out_bias)
        self.has_whole_norm = config.qk_norm == "whole"
        self.is_rotated_norm = config.qk_norm == "rotated_heads"
        self.q_norm, self.k_norm = (_head_norm(config, count, policy) for count in (n, k))
        self.sinks = parameter((n,), ("heads",), jnp.dtype(jnp.float32)) if config.has_sinks else None
        self.layer = layer
        self.scoring = Scoring(
            scale=h**-0.5 if config.attention_scale is None else config.attention_scale,
            softcap=config.attention_softcap,
            sliding_window=layer.sliding_window,
        )
        self.out_scale = config.attention_out_scale
        self.shape = (n, k, h)
        self.backend = policy.backend
        self.shards = ShardAxes(policy.rules.mesh_axes("kv_heads"), policy.rules.mesh_axes("pages"))

    def __call__(
        self, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        place = places.paged
        assert place is not None, "attention has keys and values"
        pool = cache[place.group]
        assert isinstance(pool, KVPool), "a full or sliding group"
        n, k, h = self.shape
        query, key, value = self.qkv_proj(x, step.tokens)
        gate = None
        if self.has_output_gate:
            query, gate = jnp.split(query.reshape(-1, n, 2 * h), 2, -1)
        if not self.has_whole_norm:
            query, key = query.reshape(-1, n, h), key.reshape(-1, k, h)
        if self.q_norm is not None and self.k_norm is not None and not self.is_rotated_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.reshape(-1, n, h), key.reshape(-1, k, h), value.reshape(-1, k, h)
        query, key, rotation = self._positioned(query, key, step)
        with jax.named_scope("paged_attention"):
            attended, *pages = write_and_attend(
                query,
                key,
                value,
                *pool,
                jnp.int32(place.index),
                step.paging(place),
                rotation=rotation,
                scoring=self.scoring,
                sinks=None if self.sinks is None else self.sinks[...],
                backend=self.backend,
                shards=self.shards,
            )  # (T, N, H)
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate)
        out = self.o_proj(attended.reshape(-1, n * h), step.tokens)
        return out if self.out_scale == 1 else out * self.out_scale, with_group(cache, place, KVPool(*pages))

    def _positioned(
        self, query: Float[Array, "T N H"], key: Float[Array, "T K H"], step: StepContext
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Rotation | None]:
        """Apply what depends on positions and comes before the kernel; return the rotation that the kernel applies."""
        rotation = step.rotation_of(self.layer)
        if step.query_scales is not None:
            query = query * step.query_scales[:, None, None].astype(query.dtype)
        if not self.is_rotated_norm or self.q_norm is None or self.k_norm is None:
            return query, key, rotation
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        return self.q_norm(query), self.k_norm(key), None


def _head_norm(config: DecoderConfig, num_heads: int, policy: DtypePolicy) -> RMSNorm | None:
    if config.qk_norm == "none":
        return None
    width = config.head_dim * (num_heads if config.qk_norm == "whole" else 1)
    return RMSNorm(width, config.norm_eps, policy, config.norm_weights)
