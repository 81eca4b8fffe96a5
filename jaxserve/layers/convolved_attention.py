"""Compressed convolutional attention (arXiv 2510.04476): grouped-query attention with convolved queries, keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention import Scoring, ShardAxes, write_and_attend
from jaxtyping import Array, Float

from jaxserve.layers.attention import StepContext, kv_scale
from jaxserve.layers.cache import Cache, KVPool, with_group
from jaxserve.layers.linear import Linear
from jaxserve.layers.mixers import mix
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.recurrent_mixers.convolved_qkv import ConvolvedQKV
from jaxserve.layers.rope import row_order
from jaxserve.model_config.cache import LayerPlaces
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import ConvolvedQKVConfig


class ConvolvedAttention(nnx.Module):
    """Convolved queries, keys and values, queries and keys of unit mean square, a factor on each key head, rotation with KV write and
    attention, output projection."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, qkv: ConvolvedQKVConfig, policy: DtypePolicy) -> None:
        n, h = qkv.num_heads, qkv.head_dim
        self.convolved_qkv = ConvolvedQKV(config, qkv, policy)
        self.key_factors = KeyFactors(qkv.num_kv_heads, policy)
        self.o_proj = Linear(config.hidden_size, n * h, ("embed", "heads"), policy)
        shape = config.kv_shape(layer)
        scales = shape[:1] if policy.kv_scales == "heads" else shape
        self.k_scale, self.v_scale = (kv_scale(scales) if policy.kv_scales is not None else None for _ in range(2))
        order = row_order(config, is_sliding=layer.sliding_window is not None)
        self.order = None if order is None else tuple(order.tolist())
        """Order of a head's numbers in which kernels rotate them: convolutions have the checkpoint's."""
        self.layer, self.qkv, self.num_copies = layer, qkv, shape[0] // qkv.num_kv_heads
        self.scoring = Scoring(scale=h**-0.5, softcap=None, sliding_window=layer.sliding_window)
        self.backend = policy.attention_backend
        self.shards = ShardAxes(policy.rules.mesh_axes("kv_heads"), policy.rules.mesh_axes("pages"))

    def __call__(
        self, x: Float[Array, "T D"], cache: Cache, places: LayerPlaces, step: StepContext
    ) -> tuple[Float[Array, "T D"], Cache]:
        place, qkv = places.paged, self.qkv
        assert place is not None, "attention has keys and values"
        made, cache = mix(self.convolved_qkv, x, cache, places.state, step)
        pool = cache[place.group]
        assert isinstance(pool, KVPool), "a full or sliding group"
        heads = made.reshape(len(x), -1, qkv.head_dim)
        query, key, value = jnp.split(heads, (qkv.num_heads, qkv.num_heads + qkv.num_kv_heads), 1)
        query, key = map(_unit, (query, key))
        if self.order is not None:
            query, key = (each[..., jnp.array(self.order)] for each in (query, key))
        key = key * self.key_factors.temp[...][:, None]
        if self.num_copies > 1:
            key, value = (jnp.repeat(each, self.num_copies, 1) for each in (key, value))
        with jax.named_scope("paged_attention"):
            attended, *pages = write_and_attend(
                query,
                key,
                value,
                *pool,
                jnp.int32(place.index),
                step.paging(place),
                rotation=step.rotation_of(self.layer),
                scoring=self.scoring,
                scales=self.kv_scales,
                backend=self.backend,
                shards=self.shards,
            )  # (T, N, H)
        return self.o_proj(attended.reshape(len(x), -1), step.tokens), with_group(cache, place, KVPool(*pages))

    @property
    def kv_scales(self) -> KVScales | None:
        """Scales of the keys and values that the layer stores; None if it has none."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return KVScales(self.k_scale[...], self.v_scale[...])


class KeyFactors(nnx.Module):
    """A factor on each key head."""

    def __init__(self, num_heads: int, policy: DtypePolicy) -> None:
        self.temp = parameter((num_heads,), (None,), policy.vectors)


def _unit(x: Float[Array, "T N H"]) -> Float[Array, "T N H"]:
    """Return x over the root mean square of its last axis."""
    wide = x.astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(wide * wide, -1, keepdims=True))
    shortest = float(jnp.finfo(x.dtype).eps)  # type: ignore[no-untyped-call]
    scaled: Array = wide * (x.shape[-1] ** 0.5 / jnp.maximum(length, shortest))
    return scaled.astype(x.dtype)
