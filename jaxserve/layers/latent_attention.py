"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

The matrix that makes keys of a latent vector is applied to the query instead, and the one that makes values to the result:
attention then reads one vector per token for all heads, as grouped-query attention with one key head does.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.latent_attention import write_and_attend
from jaxserve_kernels.paged_attention import Scoring, ShardAxes
from jaxserve_kernels.rope import Rotation, rotate
from jaxtyping import Array, Float

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, LatentPool, with_group
from jaxserve.layers.linear import Linear, Matrix, Tokens, apply_together
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.latent import LatentConfig

_NORM_EPS: Final = 1e-6
"""Epsilon of the norms of compressed queries, keys and values; the config has that of the other norms."""


class LatentAttention(nnx.Module):
    """Compressed queries, keys and values, attention over latent vectors, output projection."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, policy: DtypePolicy) -> None:
        latent = config.latent
        assert latent is not None, "a decoder with latent attention"
        d, n, bias = config.hidden_size, config.num_heads, config.attention_out_bias
        if latent.query_rank is None:
            self.q_proj = Linear(n * latent.query_dim, d, ("kv_heads", "embed"), policy)
        else:
            self.q_a_proj = Linear(latent.query_rank, d, (None, "embed"), policy, bias=bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, _NORM_EPS, policy)
            self.q_b_proj = Linear(n * latent.query_dim, latent.query_rank, ("kv_heads", None), policy)
        self.kv_a_proj_with_mqa = Linear(latent.width, d, (None, "embed"), policy, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent.rank, _NORM_EPS, policy)
        self.kv_b_proj = LatentMatrix(latent, n, policy)
        self.o_proj = Linear(d, n * latent.value_dim, ("embed", "heads"), policy, bias=bias)
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
        query, stored = apply_together((queries_from, self.kv_a_proj_with_mqa), x, step.tokens)
        query = self._queries(query, step.tokens)
        plain, turning = jnp.split(query, [self.latent.plain_dim], -1)
        query = jnp.concatenate([self.kv_b_proj.absorb(plain), self._rotated(turning, rotation)], -1)  # (T, N, W)
        if step.query_scales is not None:
            query = query * step.query_scales[:, None, None].astype(query.dtype)
        with jax.named_scope("latent_attention"):
            attended, latents = write_and_attend(
                query,
                self._latents(stored, rotation),
                pool.latents,
                jnp.int32(place.index),
                step.paging(place),
                value_width=self.latent.rank,
                scoring=self.scoring,
                backend=self.backend,
                shards=self.shards,
            )  # (T, N, C), or (R, T, N, C) with pages on R data ranks; C: the rank
        values = self.kv_b_proj.values(attended)
        return self.o_proj(values, step.tokens), with_group(cache, place, LatentPool(latents))

    def _queries(self, query: Float[Array, "T _"], tokens: Tokens) -> Float[Array, "T N _"]:
        """Return the queries of all heads, from those or from their compressed form."""
        if self.latent.query_rank is not None:
            query = self.q_b_proj(self.q_a_layernorm(query), tokens)
        return query.reshape(-1, self.num_heads, self.latent.query_dim)

    def _latents(self, stored: Float[Array, "T _"], rotation: Rotation | None) -> Float[Array, "T 1 W"]:
        """Return the vectors that are cached, from the output of their projection."""
        compressed, key = jnp.split(stored, [self.latent.rank], -1)
        key = self._rotated(key[:, None], rotation)
        return jnp.concatenate([self.kv_a_layernorm(compressed)[:, None], key], -1)

    def _rotated(self, x: Float[Array, "T N R"], rotation: Rotation | None) -> Float[Array, "T N R"]:
        if self.has_adjacent_pairs:
            x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], -1)
        return x if rotation is None else rotate(x, rotation)


class LatentMatrix(Matrix):
    """The matrix that makes every head's key and value of a latent vector; never quantised."""

    def __init__(self, latent: LatentConfig, num_heads: int, policy: DtypePolicy) -> None:
        rows = latent.plain_dim + latent.value_dim
        super().__init__(num_heads * rows, latent.rank, ("kv_heads", None), policy.unquantized)
        self.shape = (num_heads, rows, latent.rank)
        self.split_at = latent.plain_dim

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
