"""Grouped-query attention over the paged KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels import block_sparse_attention
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention import Paging, Ragged, Scoring, ShardAxes, write, write_and_attend
from jaxserve_kernels.rope import Rotation, rotate
from jaxserve_kernels.segments import Segments
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.block_indexer import BlockIndexer, PooledIndexer, block_indexer
from jaxserve.layers.cache import Cache, GroupStep, IndexPool, KVPool, StateSlots, with_group
from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.norm import LayerNorm, RMSNorm, norm_of, normalized
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.segment_attention import Texts, attend
from jaxserve.model_config.cache import CachePlace, LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig, query_heads


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
    causal_ragged: Ragged | None = None
    """Segments for causal layers of a step in which others see images as a whole; None: there are no such layers."""
    kv_scales: Mapping[CachePlace, KVScales] | None = None
    """Scales of keys and values for layers that read those of others, by the place in the cache; None: no layer does."""
    positions: Int[Array, "T"] | None = None
    """Position of each token, for models with learned embeddings of positions."""
    token_ids: Int[Array, "T"] | None = None
    """The tokens, for routers that choose experts by them and for embeddings of several of them; None: there are none of both."""
    texts: Texts | None = None
    """Texts in which every token attends to all others, without a cache; None: tokens attend to those before them."""

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
        """Number of real tokens, which come before padding, their adapters, and the tokens for routers that choose by them."""
        return Tokens(self.rows.query_starts[-1], self.adapters, self.token_ids)

    def paging(self, place: CachePlace) -> Paging:
        """Return the pages of the group of `place`."""
        paging = self.groups[place.group]
        assert isinstance(paging, Paging), "a group with pages"
        return paging

    def causal_paging(self, place: CachePlace) -> Paging:
        """Return the pages of the group of `place` for a layer in which every token sees those before it only."""
        paging = self.paging(place)
        if paging.key_ends is None:
            return paging
        assert self.causal_ragged is not None, "a step with causal layers"
        return paging._replace(key_ends=None, ragged=self.causal_ragged)

    def slots(self, place: CachePlace) -> StateSlots:
        """Return the state slots of the group of `place`."""
        slots = self.groups[place.group]
        assert isinstance(slots, StateSlots), "a state group"
        return slots


class Attention(nnx.Module):
    """Projections, optional per-head norms, rotation with KV write and attention, output projection.

    A layer that reads another layer's keys and values has queries only, and writes nothing.
    """

    def __init__(
        self, config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy, *, in_dim: int | None = None
    ) -> None:
        """in_dim: width of the input; None: D."""
        d, n = config.hidden_size, query_heads(config, layer)
        k, h = config.kv_shape(layer)
        v = config.value_dim or h
        self.output_gate, self.gate_activation = config.output_gate, config.gate_activation
        parts = {"q_proj": n * h * (2 if self.output_gate == "queries" else 1)}
        if layer.kv_source is None:
            parts |= {"k_proj": k * h, "v_proj": k * v} if layer.has_value_projection else {"k_proj": k * h}
        if self.output_gate in ("apart", "heads"):
            parts["gate_proj"] = n if self.output_gate == "heads" else n * v
        make = partial(Linear, in_dim=in_dim or d, axes=("kv_heads", "embed"), policy=policy, bias=config.qkv_bias)
        self.qkv_proj = FusedLinear(parts, make, policy, num_units=k)
        self.o_proj = Linear(d, n * v, ("embed", "heads"), policy, bias=config.attention_out_bias)
        self.attn_sub_norm = norm_of(config.norm_kind, n * v, config, policy) if config.has_inner_norms else None
        self.has_whole_norm = config.qk_norm == "whole"
        self.is_rotated_norm = config.qk_norm == "rotated_heads"
        self.unit_eps = config.norm_eps if config.qk_norm == "rotated_unit" and layer.use_rope else None
        scaling = config.query_scaling
        self.scales_queries = scaling is not None and not (scaling.only_without_rope and layer.use_rope)
        self.q_norm = _head_norm(config, n, h, policy)
        self.k_norm = _head_norm(config, k, h, policy) if layer.kv_source is None else None
        self.indexer = None if layer.blocks is None else block_indexer(config, layer.blocks, policy)
        self.value_eps = config.norm_eps if config.has_value_norm else None
        has_sinks = config.sinks == "all" or (config.sinks == "windows" and layer.sliding_window is not None)
        self.sinks = parameter((n,), ("heads",), jnp.dtype(jnp.float32)) if has_sinks else None
        has_scales = policy.kv_scales is not None and layer.kv_source is None
        shape = (k,) if policy.kv_scales == "heads" else (k, h)
        self.k_scale, self.v_scale = (kv_scale(shape) if has_scales else None for _ in range(2))
        self.layer = layer
        self.scoring = Scoring(
            scale=h**-0.5 if config.attention_scale is None else config.attention_scale,
            softcap=config.attention_softcap,
            sliding_window=layer.sliding_window,
            is_chunked=layer.is_chunked,
        )
        vision = config.vision
        self.is_causal = (
            vision is not None and vision.bidirectional_layers == "sliding" and layer.sliding_window is None
        ) or (config.dflash is not None and config.dflash.is_causal(layer.sliding_window))
        self.has_short_rows = config.dflash is not None
        self.out_scale, self.clip = config.attention_out_scale, config.qkv_clip
        self.shape = (n, k, h)
        self.value_dim, self.value_scale = v, config.value_scale
        self.backend, self.is_alike = policy.attention_backend, policy.backend in NATIVE
        self.text_backend = policy.backend
        self.shards = ShardAxes(policy.rules.mesh_axes("kv_heads"), policy.rules.mesh_axes("pages"))

    def __call__(
        self, x: Float[Array, "T I"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        place, pool = _pool(cache, places)
        n = self.shape[0]
        query, key, value, gate, rotation = self._projected(x, step)
        if step.texts is not None:
            with jax.named_scope("text_attention"):
                attended, pages = self._attend_texts(query, key, value, rotation, step.texts), [*pool]
        elif self.indexer is not None:
            attended, pages, cache = self._attend_blocks(self.indexer, x, (query, key, value), cache, places, step)
        else:
            with jax.named_scope("paged_attention"):
                attended, *pages = write_and_attend(
                    query,
                    key,
                    value,
                    *pool,
                    jnp.int32(place.index),
                    step.causal_paging(place) if self.is_causal else step.paging(place),
                    rotation=rotation,
                    scoring=self.scoring,
                    sinks=None if self.sinks is None else self.sinks[...],
                    scales=self.kv_scales or _scales_of_other(place, step),
                    backend=self.backend,
                    shards=self.shards,
                    is_written=self.layer.kv_source is not None,
                    has_short_rows=self.has_short_rows,
                )  # (T, N, H)
        attended = attended[..., : self.value_dim]
        if gate is not None:
            attended = attended * self._activated(gate)
        attended = attended.reshape(-1, n * self.value_dim)
        if self.attn_sub_norm is not None:
            attended = self.attn_sub_norm(attended)
        out = self.o_proj(attended, step.tokens)
        return out if self.out_scale == 1 else out * self.out_scale, with_group(cache, place, KVPool(*pages))

    def store(self, x: Float[Array, "T I"], cache: Cache, places: LayerPlaces, step: StepContext) -> Cache:
        """Return the cache with the keys and values of tokens; nothing attends to them in this call."""
        place, pool = _pool(cache, places)
        _, key, value, _, rotation = self._projected(x, step)
        with jax.named_scope("kv_write"):
            pages = write(
                key,
                value,
                *pool,
                jnp.int32(place.index),
                step.paging(place),
                num_heads=self.shape[0],
                scoring=self.scoring,
                rotation=rotation,
                scales=self.kv_scales,
                backend=self.backend,
                shards=self.shards,
            )
        return with_group(cache, place, KVPool(*pages))

    def _projected(
        self, x: Float[Array, "T I"], step: StepContext
    ) -> tuple[
        Float[Array, "T N H"],
        Float[Array, "T K H"],
        Float[Array, "T K H"],
        Float[Array, "T N G"] | None,
        Rotation | None,
    ]:
        """Return queries, keys, values, gates if there are any, and the rotation that the kernel applies."""
        n, k, h = self.shape
        query, *stored = self.qkv_proj(x, step.tokens)
        if self.clip is not None:
            query, *stored = (jnp.clip(each, -self.clip, self.clip) for each in (query, *stored))
        gate = None
        if self.output_gate == "queries":
            query, gate = jnp.split(query.reshape(-1, n, 2 * h), 2, -1)
        elif self.output_gate != "none":
            gate = stored.pop().reshape(len(x), n, -1)  # (T, N, H), or (T, N, 1)
        query, stored, rotation = self._positioned(query, stored, step)
        # Without keys and values of its own only their shape counts: the pages hold what another layer wrote.
        key, value = stored or [jnp.zeros((len(x), k, h), x.dtype)] * 2
        if self.value_eps is not None:
            value = normalized(value, self.value_eps, is_alike=self.is_alike).astype(value.dtype)
        if self.value_scale != 1:
            value = value * self.value_scale
        if stored and self.value_dim < h:
            value = jnp.pad(value, ((0, 0), (0, 0), (0, h - self.value_dim)))
        return query, key, value, gate, rotation

    def _attend_blocks(
        self,
        indexer: BlockIndexer | PooledIndexer,
        x: Float[Array, "T I"],
        projected: tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]],
        cache: Cache,
        places: LayerPlaces,
        step: StepContext,
    ) -> tuple[Float[Array, "T N H"], list[Array], Cache]:
        """Attend to the blocks that the indexer chooses; returns the pools of keys and values, and the cache with the indexer's keys."""
        paged, index = places.paged, places.index
        assert paged is not None and index is not None, "an indexer has a cache"
        pool, index_pool, rotation = cache[paged.group], cache[index.group], step.rotation_of(self.layer)
        assert isinstance(pool, KVPool) and isinstance(index_pool, IndexPool), (
            "groups of keys and values, and of indexers"
        )
        query, key, value = projected
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        paging = step.paging(paged)
        keys, layer, num_pages = index_pool.keys, jnp.int32(index.index), paging.block_tables.shape[1]
        operands = indexer.operands(x, step.tokens, rotation, keys, layer, num_pages)
        with jax.named_scope("block_sparse_attention"):
            attended, *pages, index_pages = block_sparse_attention.write_and_attend(
                query,
                key,
                value,
                *pool,
                jnp.int32(paged.index),
                paging,
                operands,
                choice=indexer.choice,
                scoring=self.scoring,
                scales=self.kv_scales,
                backend=self.backend,
                shards=self.shards,
            )
        return attended, pages, with_group(cache, index, IndexPool(index_pages))

    def _attend_texts(
        self,
        query: Float[Array, "T N H"],
        key: Float[Array, "T K H"],
        value: Float[Array, "T K H"],
        rotation: Rotation | None,
        texts: Texts,
    ) -> Float[Array, "T N H"]:
        """Attend within each text, in both directions."""
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        scale, window = self.scoring.scale, self.scoring.sliding_window
        return attend(query, key, value, texts, scale, window=window, backend=self.text_backend)

    def _activated(self, gate: Float[Array, "T N G"]) -> Float[Array, "T N G"]:
        if self.gate_activation == "sigmoid":
            return jax.nn.sigmoid(gate)
        return jax.nn.softplus(gate.astype(jnp.float32)).astype(gate.dtype)

    @property
    def kv_scales(self) -> KVScales | None:
        """Scales of the keys and values that the layer stores; None if it has none."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return KVScales(self.k_scale[...], self.v_scale[...])

    def _positioned(
        self, query: Array, stored: list[Array], step: StepContext
    ) -> tuple[Array, list[Array], Rotation | None]:
        """Return queries, and keys and values if the layer has its own, by heads, and the rotation that the kernel applies.

        Norms and factors by position are applied, and the rotation if it comes before the norms. stored: projected keys,
        and values if they have a projection.
        """
        n, k, h = self.shape
        heads, counts = [query, *stored[:1]], (n, k)
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        if not self.has_whole_norm:
            heads = [x.reshape(-1, count, h) for x, count in zip(heads, counts, strict=False)]
        if norms and not self.is_rotated_norm:
            heads = [norm(x) for x, norm in zip(heads, norms, strict=True)]
        heads = [x.reshape(-1, count, h) for x, count in zip(heads, counts, strict=False)]
        values = [x.reshape(-1, k, self.value_dim) for x in stored[-1:]]
        if step.query_scales is not None and self.scales_queries:
            heads[0] = heads[0] * step.query_scales[:, None, None].astype(heads[0].dtype)
        rotation = step.rotation_of(self.layer)
        if norms and self.is_rotated_norm:
            rotated = heads if rotation is None else [rotate(x, rotation) for x in heads]
            heads, rotation = [norm(x) for x, norm in zip(rotated, norms, strict=True)], None
        elif self.unit_eps is not None and rotation is not None:
            rotated = [rotate(x, rotation) for x in heads]
            heads = [normalized(x, self.unit_eps, is_alike=self.is_alike).astype(x.dtype) for x in rotated]
            rotation = None
        return heads[0], [*heads[1:], *values], rotation


def _pool(cache: Cache, places: LayerPlaces) -> tuple[CachePlace, KVPool]:
    """Return a layer's place among groups of keys and values, and the pool of its group."""
    place = places.paged
    assert place is not None, "attention has keys and values"
    pool = cache[place.group]
    assert isinstance(pool, KVPool), "a full or sliding group"
    return place, pool


def _scales_of_other(place: CachePlace, step: StepContext) -> KVScales | None:
    """Return the scales of the layer whose keys and values are at `place`, if it has some."""
    return None if step.kv_scales is None else step.kv_scales.get(replace(place, is_owner=True))


def kv_scale(shape: tuple[int, ...]) -> nnx.Param[jax.Array]:
    """Declare the scales of a layer's keys or values."""
    return parameter(shape, ("kv_heads", None)[: len(shape)], jnp.dtype(jnp.float32))


def _head_norm(config: DecoderConfig, num_heads: int, head_dim: int, policy: DtypePolicy) -> RMSNorm | LayerNorm | None:
    if config.qk_norm in ("none", "rotated_unit"):
        return None
    width = head_dim * (num_heads if config.qk_norm == "whole" else 1)
    groups, axis = (num_heads, "kv_heads") if config.qk_norm == "each_head" else (None, None)
    return norm_of(
        config.qk_norm_kind, width, config, policy, weights=config.qk_norm_weights, num_groups=groups, axis=axis
    )
