"""Attention over one vector per token inside a window, and over compressed blocks of tokens before it (DeepSeek-V4).

All heads read the same vectors, which are keys and values in one. The last numbers of a vector rotate, so what a head has read is rotated
back by the query's position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.compressed_attention import (
    Closing,
    Compressed,
    Mixture,
    closing_tokens,
    compress,
    write,
    write_and_attend,
    write_blocks,
)
from jaxserve_kernels.paged_attention import Paging, Scoring, ShardAxes
from jaxserve_kernels.rope import Rotation, rotate
from jaxserve_kernels.sparse_attention import IndexQueries, choose_blocks
from jaxtyping import Array, Float, Int, Num

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, IndexPool, LatentPool, with_group
from jaxserve.layers.latent_attention import rotated
from jaxserve.layers.linear import Linear, Matrix, apply_together
from jaxserve.layers.norm import norm_of, normalized
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.rope import rotation as rotation_at
from jaxserve.model_config.cache import CachePlace, LayerPlaces
from jaxserve.model_config.compressed import CompressedConfig, Compression
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig


class CompressedAttention(nnx.Module):
    """Compressed queries, attention to a window and to blocks in one softmax with sinks, output projection in two steps."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy) -> None:
        own = config.compressed
        assert own is not None, "a decoder with one vector per token"
        d, n = config.hidden_size, config.num_heads
        self.q_a_proj = Linear(own.query_rank, d, (None, "embed"), policy)
        self.q_a_norm = norm_of("rms", own.query_rank, config, policy)
        self.q_b_proj = Linear(n * own.dim, own.query_rank, ("kv_heads", None), policy)
        self.kv_proj = Linear(own.dim, d, (None, "embed"), policy)
        self.kv_norm = norm_of("rms", own.dim, config, policy)
        self.o_a_proj = GroupedMatrix(own, n, policy)
        self.o_b_proj = Linear(d, own.num_groups * own.group_rank, ("embed", "heads"), policy)
        self.sinks = parameter((n,), ("heads",), jnp.dtype(jnp.float32))
        blocks = layer.compression
        self.compressor = None if blocks is None else Compressor(config, own, blocks, policy)
        self.layer, self.own, self.num_heads, self.eps = layer, own, n, config.norm_eps
        self.scoring = Scoring(scale=own.dim**-0.5)
        self.is_alike, self.backend = policy.backend in NATIVE, policy.attention_backend
        self.shards = ShardAxes(policy.rules.mesh_axes("kv_heads"))

    def __call__(
        self, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        place, rotation = places.paged, step.rotation_of(self.layer)
        assert place is not None and rotation is not None, "attention has a cache and rotates"
        linears = [] if self.compressor is None else self.compressor.linears
        query, vector, *added = apply_together((self.q_a_proj, self.kv_proj, *linears), x, step.tokens)
        compressed = self.q_a_norm(query)
        query = self.q_b_proj(compressed, step.tokens).reshape(len(x), self.num_heads, -1)
        query = normalized(query, self.eps, is_alike=self.is_alike).astype(x.dtype)
        blocks, rate = None, 1
        if self.compressor is not None:
            blocks, cache = self.compressor(x, compressed, added, cache, places, step)
            rate = self.compressor.rate
        pool = cache[place.group]
        assert isinstance(pool, LatentPool), "a latent group"
        with jax.named_scope("compressed_attention"):
            attended, pages = write_and_attend(
                turned(query, rotation, self.own.rope_dim),
                turned(self.kv_norm(vector)[:, None], rotation, self.own.rope_dim)[:, 0],
                pool.latents,
                jnp.int32(place.index),
                step.paging(place),
                blocks,
                window=self.own.window,
                rate=rate,
                scoring=self.scoring,
                sinks=self.sinks[...],
                backend=self.backend,
                shards=self.shards,
            )  # (T, N, H)
        values = self.o_a_proj.project(_turned_back(attended, rotation, self.own.rope_dim))
        return self.o_b_proj(values, step.tokens), with_group(cache, place, LatentPool(pages))


class GroupedMatrix(Matrix):
    """A matrix for each group of heads, which projects what the group has read; never quantised."""

    def __init__(self, own: CompressedConfig, num_heads: int, policy: DtypePolicy) -> None:
        shape = own.num_groups * own.group_rank, num_heads * own.dim // own.num_groups
        super().__init__(*shape, ("kv_heads", None), policy.unquantized)
        self.num_groups = own.num_groups

    def project(self, x: Float[Array, "T N H"]) -> Float[Array, "T _"]:
        """Return the projections of all groups."""
        weight = self.weight.get_value().values.reshape(self.num_groups, -1, self.spec.in_dim)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        grouped = x.reshape(len(x), self.num_groups, -1)
        return jnp.einsum("tgi,gri->tgr", grouped, weight.astype(x.dtype), precision=precision).reshape(len(x), -1)


class BlockVectors(nnx.Module):
    """Vectors of blocks: for each number a softmax over the tokens of a block weights what they add; then a norm and a rotation."""

    def __init__(self, config: DecoderConfig, blocks: Compression, dim: int, start: int, policy: DtypePolicy) -> None:
        """start: place of the numbers in what a token adds, which the scores follow."""
        width, plain = blocks.parts(dim), policy.unquantized
        self.kv_proj = Linear(width, config.hidden_size, (None, "embed"), plain)
        self.gate_proj = Linear(width, config.hidden_size, (None, "embed"), plain)
        self.position_bias = parameter((blocks.rate, width), (None, None), jnp.dtype(jnp.float32))
        self.kv_norm = norm_of("rms", dim, config, policy)
        self.mixture = Mixture(blocks.rate, start, dim, blocks.overlaps)
        self.backend = policy.attention_backend

    def vectors(
        self, pages: Num[Array, "L P 1 S W"], place: CachePlace, paging: Paging, closing: Closing, rotation: Rotation
    ) -> Float[Array, "E H"]:
        """Return the vectors of the blocks that the tokens of `closing` end, in float32."""
        bias, layer = self.position_bias[...], jnp.int32(place.index)
        made = compress(pages, layer, paging, closing, bias, self.mixture, backend=self.backend)
        return turned(self.kv_norm(made)[:, None], rotation, 2 * rotation.cos.shape[-1])[:, 0]


class Compressor(BlockVectors):
    """The blocks of a layer: their vectors, and which of them a query attends to."""

    def __init__(self, config: DecoderConfig, own: CompressedConfig, blocks: Compression, policy: DtypePolicy) -> None:
        super().__init__(config, blocks, own.dim, 0, policy)
        start = 2 * blocks.parts(own.dim)
        self.indexer = None if blocks.indexer is None else BlockIndexer(config, own, blocks, start, policy)
        self.rate, self.config = blocks.rate, config

    @property
    def linears(self) -> list[Linear]:
        """Matmuls of the layer's input that make what a token adds, in its order."""
        parts: list[BlockVectors] = [self, *([] if self.indexer is None else [self.indexer])]
        return [linear for part in parts for linear in (part.kv_proj, part.gate_proj)]

    def __call__(
        self,
        x: Float[Array, "T D"],
        compressed: Float[Array, "T C"],
        added: list[Float[Array, "T _"]],
        cache: Cache,
        places: LayerPlaces,
        step: StepContext,
    ) -> tuple[Compressed, Cache]:
        """Return the blocks, those that end in the step among them, and the cache with them. compressed: queries of the attention."""
        place, of_blocks = places.added, places.blocks
        assert place is not None and of_blocks is not None, "a layer with blocks has a cache for them"
        group, blocks = cache[place.group], cache[of_blocks.group]
        assert isinstance(group, LatentPool) and isinstance(blocks, LatentPool), "groups of vectors"
        paging, own = step.paging(place), step.paging(of_blocks)
        with jax.named_scope("compress"):
            pages = write(jnp.concatenate(added, -1), group.latents, jnp.int32(place.index), paging)
            cache = with_group(cache, place, LatentPool(pages))
            closing = closing_tokens(own, len(x), self.rate)
            rotation = rotation_at(self.config, closing.ends - self.rate)
            vectors = self.vectors(pages, place, paging, closing, rotation)
            layer = jnp.int32(of_blocks.index)
            latents = write_blocks(vectors, blocks.latents, layer, own, closing, self.rate)
            cache = with_group(cache, of_blocks, LatentPool(latents))
        if self.indexer is None:
            return Compressed(latents, layer, own), cache
        of_keys = places.index
        assert of_keys is not None, "an indexer has a cache"
        keys = cache[of_keys.group]
        assert isinstance(keys, IndexPool), "an index group"
        with jax.named_scope("indexer"):
            found = self.indexer.vectors(pages, place, paging, closing, rotation)
            index = jnp.int32(of_keys.index)
            key_pages = write_blocks(found, keys.keys, index, step.paging(of_keys), closing, self.rate)
            chosen = self.indexer.choose(x, compressed, key_pages, index, step.paging(of_keys), step)
        return Compressed(latents, layer, own, chosen), with_group(cache, of_keys, IndexPool(key_pages))


class BlockIndexer(BlockVectors):
    """The indexer of blocks: it has keys of them, queries made of compressed queries, and a weight for each head (see `Indexer`)."""

    def __init__(
        self, config: DecoderConfig, own: CompressedConfig, blocks: Compression, start: int, policy: DtypePolicy
    ) -> None:
        indexer = blocks.indexer
        assert indexer is not None, "blocks with an indexer"
        super().__init__(config, blocks, indexer.head_dim, start, policy)
        self.q_b_proj = Linear(indexer.num_heads * indexer.head_dim, own.query_rank, (None, None), policy)
        self.weights_proj = Linear(indexer.num_heads, config.hidden_size, (None, "embed"), policy.unquantized)
        self.config, self.rope_dim, self.rate = indexer, own.rope_dim, blocks.rate

    def choose(
        self,
        x: Float[Array, "T D"],
        compressed: Float[Array, "T C"],
        pages: Num[Array, "L P 1 U I"],
        layer: Int[Array, ""],
        paging: Paging,
        step: StepContext,
    ) -> Int[Array, "T B"]:
        """Return the blocks that each token attends to if there are more."""
        query = self.q_b_proj(compressed, step.tokens).reshape(-1, self.config.num_heads, self.config.head_dim)
        weights = self.weights_proj.multiply(x, step.tokens.num_real)  # in float32
        index = IndexQueries(turned(query, step.rotation, self.rope_dim), weights)
        count = self.config.num_chosen
        return choose_blocks(index, pages, layer, paging, num_chosen=count, rate=self.rate, backend=self.backend)


def turned(x: Float[Array, "T N H"], rotation: Rotation, dim: int) -> Float[Array, "T N H"]:
    """Return x with its last `dim` numbers rotated, of which the first ones of all pairs then come first."""
    plain, turning = jnp.split(x, [x.shape[-1] - dim], -1)
    return jnp.concatenate([plain, rotated(turning, rotation, has_adjacent_pairs=True)], -1)


def _turned_back(x: Float[Array, "T N H"], rotation: Rotation, dim: int) -> Float[Array, "T N H"]:
    """Undo `turned`, and the order of the numbers as well."""
    plain, turning = jnp.split(x, [x.shape[-1] - dim], -1)
    firsts, seconds = jnp.split(rotate(turning, Rotation(rotation.cos, -rotation.sin)), 2, -1)
    pairs = jnp.stack([firsts, seconds], -1).reshape(turning.shape)
    return jnp.concatenate([plain, pairs], -1)
