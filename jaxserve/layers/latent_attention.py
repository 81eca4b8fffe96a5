"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

The matrix that makes keys of a latent vector is applied to the query instead, and the one that makes values to the result:
attention then reads one vector per token for all heads, as grouped-query attention with one key head does.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels import latent_attention, sparse_attention
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.paged_attention import Scoring, ShardAxes
from jaxserve_kernels.rope import Rotation, rotate
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, ChosenTokens, IndexPool, LatentPool, with_group
from jaxserve.layers.linear import Linear, Matrix, Tokens, apply_together
from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.latent import LatentConfig

_NORM_EPS: Final = 1e-6
"""Epsilon of the norms of an indexer; the config has that of the other norms."""


class PositionScales(nnx.Module):
    """Factors on the queries of heads that are linear in the logarithm of the position: see `DecoderConfig.has_position_scales`."""

    def __init__(self, num_heads: int, axis: str | None) -> None:
        self.scale, self.bias = (parameter((num_heads,), (axis,), jnp.dtype(jnp.float32)) for _ in range(2))

    def __call__(self, query: Float[Array, "T N W"], positions: Int[Array, "T"] | None) -> Float[Array, "T N W"]:
        assert positions is not None, "a step of a model with factors by position"
        logs = jnp.log1p(positions.astype(jnp.float32))
        factors = self.scale[...] * logs[:, None] + self.bias[...]  # (T, N)
        return query * factors[:, :, None].astype(query.dtype)


class LatentAttention(nnx.Module):
    """Compressed queries, keys and values, attention over latent vectors, output projection.

    A layer that reads another layer's vectors makes none.
    """

    def __init__(self, config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy) -> None:
        latent = config.latent
        assert latent is not None, "a decoder with latent attention"
        d, n, bias = config.hidden_size, config.num_heads, config.attention_out_bias
        is_still = latent.has_own_keys_without_rope and not layer.use_rope
        self.rope_dim = 0 if is_still else latent.rope_dim
        self.plain_dim = latent.query_dim - self.rope_dim
        if latent.query_rank is None:
            self.q_proj = Linear(n * latent.query_dim, d, ("kv_heads", "embed"), policy)
        else:
            self.q_a_proj = Linear(latent.query_rank, d, (None, "embed"), policy, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, latent.norm_eps, policy)
            outputs, inputs = (latent.value_dim, 2) if latent.has_gate else (0, 1)
            shape = n * (latent.query_dim + outputs), inputs * latent.query_rank
            self.q_b_proj = Linear(*shape, ("kv_heads", None), policy)
        if layer.kv_source is None:
            self.kv_a_proj_with_mqa = Linear(latent.rank + self.rope_dim, d, (None, "embed"), policy, bias=bias)
            self.kv_a_layernorm = RMSNorm(latent.rank, latent.norm_eps, policy)
        self.kv_b_proj = LatentMatrix(latent, n, policy, plain_dim=self.plain_dim)
        self.softmax_scaling = PositionScales(n, "kv_heads") if config.has_position_scales else None
        self.o_proj = Linear(d, n * latent.value_dim, ("embed", "heads"), policy, bias=bias)
        has_indexer = latent.indexer is not None and layer.index_source is None
        self.indexer = Indexer(config, latent, policy) if has_indexer else None
        gates = {"none": 0, "heads": n, "apart": n * latent.value_dim}[config.output_gate]
        self.gate_proj = Linear(gates, d, ("kv_heads", "embed"), policy) if gates else None
        self.sinks = parameter((n,), ("heads",), jnp.dtype(jnp.float32)) if config.sinks == "all" else None
        self.layer, self.latent, self.num_heads = layer, latent, n
        self.has_adjacent_pairs = config.rotary_pairs == "adjacent"
        scale = latent.query_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.scoring = Scoring(scale=scale, softcap=None, sliding_window=None)
        self.backend = policy.attention_backend
        self.shards = ShardAxes(policy.rules.mesh_axes("kv_heads"), policy.rules.mesh_axes("pages"))

    def __call__(
        self, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        place = places.paged
        assert place is not None, "latent attention has a cache"
        pool, rotation = cache[place.group], step.rotation_of(self.layer)
        assert isinstance(pool, LatentPool), "a latent group"
        queries_from = self.q_proj if self.latent.query_rank is None else self.q_a_proj
        made_of_x = (queries_from,) if self.layer.kv_source is not None else (queries_from, self.kv_a_proj_with_mqa)
        query, *stored = apply_together(made_of_x, x, step.tokens)
        compressed = query if self.latent.query_rank is None else self.q_a_layernorm(query)
        if self.indexer is not None:
            cache = self.indexer(x, compressed, cache, places, step, rotation)
        if self.latent.has_gate:
            compressed = jnp.concatenate([compressed, query], -1)
        query = self._queries(compressed, step.tokens)
        plain, turning, gate = jnp.split(query, [self.plain_dim, self.latent.query_dim], -1)
        query = self._whole(self.kv_b_proj.absorb(plain), self._rotated(turning, rotation))  # (T, N, W)
        if self.softmax_scaling is not None:
            query = self.softmax_scaling(query, step.positions)
        if step.query_scales is not None:
            query = query * step.query_scales[:, None, None].astype(query.dtype)
        latents = self._latents(stored[0], rotation) if stored else None
        operands = query, latents, pool.latents, jnp.int32(place.index), step.paging(place)
        options: dict[str, Any] = {"value_width": self.latent.rank, "scoring": self.scoring}
        options |= {"backend": self.backend, "shards": self.shards}
        options["sinks"] = None if self.sinks is None else self.sinks[...]
        with jax.named_scope("latent_attention"):  # (T, N, C), or (R, T, N, C) with pages on R data ranks; C: the rank
            if self.latent.indexer is None:
                attended, latents = latent_attention.write_and_attend(*operands, **options)
            else:
                indexer, chosen = self.latent.indexer, _chosen(cache, places)
                options |= {"num_chosen": indexer.num_chosen, "pool_size": indexer.pool_size}
                attended, latents = sparse_attention.write_and_attend(*operands, chosen, **options)
        values = self.kv_b_proj.values(attended)
        if self.latent.has_gate:
            values = (values * jax.nn.sigmoid(gate.reshape(values.shape).astype(jnp.float32))).astype(values.dtype)
        if self.gate_proj is not None:
            gates = jax.nn.sigmoid(self.gate_proj(x, step.tokens).astype(jnp.float32)).astype(values.dtype)
            gates = gates.reshape(len(x), self.num_heads, -1)  # (T, N, V), or (T, N, 1)
            values = (values.reshape(len(x), self.num_heads, -1) * gates).reshape(len(x), -1)
        return self.o_proj(values, step.tokens), with_group(cache, place, LatentPool(latents))

    def _queries(self, query: Float[Array, "T _"], tokens: Tokens) -> Float[Array, "T N _"]:
        """Return the queries of all heads, from those or from their compressed form, with gates after them if there are some."""
        if self.latent.query_rank is not None:
            query = self.q_b_proj(query, tokens)
        return query.reshape(len(query), self.num_heads, -1)

    def _latents(self, stored: Float[Array, "T _"], rotation: Rotation | None) -> Float[Array, "T 1 W"]:
        """Return the vectors that are cached, from the output of their projection."""
        compressed, key = jnp.split(stored, [self.latent.rank], -1)
        key = self._rotated(key[:, None], rotation)
        return self._whole(self.kv_a_layernorm(compressed)[:, None], key)

    def _whole(self, compressed: Float[Array, "T N C"], turning: Float[Array, "T N _"]) -> Float[Array, "T N W"]:
        """Return both parts of a vector, with zeros after them if the second part has no numbers."""
        missing = self.latent.rope_dim - self.rope_dim
        whole = jnp.concatenate([compressed, turning], -1)
        return jnp.pad(whole, ((0, 0), (0, 0), (0, missing))) if missing else whole

    def _rotated(self, x: Float[Array, "T N R"], rotation: Rotation | None) -> Float[Array, "T N R"]:
        return rotated(x, rotation, has_adjacent_pairs=self.has_adjacent_pairs)


def _chosen(cache: Cache, places: LayerPlaces) -> Int[Array, "*R T C"]:
    """Return the tokens that the layer attends to: chosen by its own indexer, or by an earlier layer's."""
    assert places.index is not None, "a layer with an indexer, or after one"
    group = cache[places.index.group]
    assert isinstance(group, ChosenTokens), "an indexer comes before"
    return group.positions


class LatentMatrix(Matrix):
    """The matrix that makes every head's key and value of a latent vector; never quantised."""

    def __init__(self, latent: LatentConfig, num_heads: int, policy: DtypePolicy, *, plain_dim: int) -> None:
        rows = plain_dim + latent.value_dim
        super().__init__(num_heads * rows, latent.rank, ("kv_heads", None), policy.unquantized)
        self.shape = (num_heads, rows, latent.rank)
        self.split_at = plain_dim

    def absorb(self, queries: Float[Array, "T N _"]) -> Float[Array, "T N C"]:
        """Return what the queries are to latent vectors instead of keys. C: the rank."""
        return self._matmul("tnd,ndc->tnc", queries, self._parts()[0])

    def values(self, attended: Float[Array, "*R T N C"]) -> Float[Array, "T _"]:
        """Return the values of all heads from weighted sums of latent vectors, the sum over R ranks if there are ranks."""
        if attended.ndim == 4:
            made = self._matmul("rtnc,nvc->rtnv", attended, self._parts()[1])
            # `sum` would exchange float32; one term at most is not zero.
            made = jax.lax.reduce(made, jnp.zeros((), made.dtype), jax.lax.add, (0,))
        else:
            made = self._matmul("tnc,nvc->tnv", attended, self._parts()[1])
        return made.reshape(len(made), -1)

    def _parts(self) -> tuple[Array, Array]:
        whole = self.weight.get_value().values.reshape(self.shape)
        return whole[:, : self.split_at], whole[:, self.split_at :]

    @staticmethod
    def _matmul(equation: str, x: Array, weight: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.einsum(equation, x, weight.astype(x.dtype), precision=precision)


class Indexer(nnx.Module):
    """The indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556, 2.1): it chooses the tokens that a query attends to.

    It has queries made of compressed queries or of the layer's input, one key for all heads, and a weight for each head; all devices compute all of it.
    Its scores are those of the paper but for factors above zero, which do not change what is chosen: 1 / sqrt(I), and one over
    the root of the number of heads. The published code rotates queries and keys by a Hadamard matrix, which changes no product,
    before it rounds them to 8 bits; here only the cache's type rounds keys.
    """

    def __init__(self, config: DecoderConfig, latent: LatentConfig, policy: DtypePolicy) -> None:
        indexer, d = latent.indexer, config.hidden_size
        assert indexer is not None, "a decoder with an indexer"
        rank, width = d if indexer.reads_inputs else latent.query_rank, indexer.head_dim
        assert rank is not None, "an indexer reads compressed queries"
        is_alike = policy.backend in NATIVE
        self.q_input_norm = LayerNorm(d, _NORM_EPS, policy, is_alike=is_alike) if indexer.reads_inputs else None
        self.softmax_scaling = PositionScales(indexer.num_heads, None) if config.has_position_scales else None
        self.wq_b = Linear(indexer.num_heads * width, rank, (None, None), policy)
        self.wk = Linear(width, d, (None, "embed"), policy)
        self.k_norm = LayerNorm(width, indexer.norm_eps, policy, is_alike=is_alike)
        self.weights_proj = Linear(indexer.num_heads, d, (None, "embed"), policy.unquantized)
        has_pools = indexer.pool_size > 1
        self.pool_gate = Linear(width, d, (None, "embed"), policy.unquantized) if has_pools else None
        shape, single = (indexer.pool_size, width), jnp.dtype(jnp.float32)
        self.pool_bias = parameter(shape, (None, None), single) if has_pools else None
        self.config, self.rope_dim = indexer, latent.rope_dim
        self.backend = policy.attention_backend
        self.shards = ShardAxes(pages=policy.rules.mesh_axes("pages"))

    def __call__(
        self,
        x: Float[Array, "T D"],
        compressed: Float[Array, "T C"],
        cache: Cache,
        places: LayerPlaces,
        step: StepContext,
        rotation: Rotation | None,
    ) -> Cache:
        """Return the cache with the tokens' keys, and with the tokens that are chosen. compressed: queries of the attention."""
        place = places.index
        assert place is not None, "an indexer has a cache"
        group = cache[place.group]
        pool = group.pool if isinstance(group, ChosenTokens) else group
        assert isinstance(pool, IndexPool), "an index group"
        with jax.named_scope("indexer"):
            source = compressed if self.q_input_norm is None else self.q_input_norm(x)
            query = self.wq_b(source, step.tokens).reshape(-1, self.config.num_heads, self.config.head_dim)
            if self.softmax_scaling is not None:
                query = self.softmax_scaling(query, step.positions)
            weights = self.weights_proj.multiply(x, step.tokens.num_real)  # in float32
            stored = self._rotated(self.k_norm(self.wk(x, step.tokens))[:, None], rotation)[:, 0]
            if self.pool_gate is not None:
                stored = jnp.concatenate([stored, self.pool_gate(x, step.tokens)], -1)
            bias = None if self.pool_bias is None else self.pool_bias[...]
            chosen, keys = sparse_attention.write_and_choose(
                sparse_attention.IndexQueries(self._rotated(query, rotation), weights, bias),
                stored,
                pool.keys,
                jnp.int32(place.index),
                step.paging(place),
                num_chosen=self.config.num_chosen,
                backend=self.backend,
                shards=self.shards,
            )
        return with_group(cache, place, ChosenTokens(IndexPool(keys), chosen))

    def _rotated(self, x: Float[Array, "T J I"], rotation: Rotation | None) -> Float[Array, "T J I"]:
        """Return queries or keys whose first dimensions are rotated, or the last ones. Those that are come first."""
        parts = jnp.split(x, [x.shape[-1] - self.rope_dim if self.config.rotates_last else self.rope_dim], -1)
        turning, plain = reversed(parts) if self.config.rotates_last else parts
        turning = rotated(turning, rotation, has_adjacent_pairs=self.config.has_adjacent_pairs)
        return jnp.concatenate([turning, plain], -1)


def rotated(x: Float[Array, "T N R"], rotation: Rotation | None, *, has_adjacent_pairs: bool) -> Float[Array, "T N R"]:
    """Return x rotated. Of adjacent pairs the first dimensions then come before the second ones, in queries as in keys."""
    if has_adjacent_pairs:
        x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1)
    return x if rotation is None else rotate(x, rotation)
