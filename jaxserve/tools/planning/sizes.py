"""Sizes and work of one decoder on some devices, computed from its shapes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from jaxserve.config import Config
from jaxserve.layers.policy import Exchange
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig, indexer_of
from jaxserve.model_config.indexer import BlockIndexerConfig
from jaxserve.model_config.latent import IndexerConfig
from jaxserve.model_config.recurrent import MambaConfig
from jaxserve.models.skeleton import DecoderSkeleton, LeafSpec, ModelSkeleton
from jaxserve.models.step_work import local_bytes, step_work
from jaxserve.quant.names import NO_QUANTIZATION
from jaxserve.runner.backend import state_copies
from jaxserve.runner.cache_sizes import CacheSizes
from jaxserve.runner.limits import kv_specs
from jaxserve.sharding.rules import AxisRules, MeshShape, cache_shards

_TILE_QUERIES = 64
"""Queries whose scores an indexer has in memory."""
_SCANNED = 4
"""Arrays of tokens and channels in a selective scan: what is added, steps, and the results twice."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one model on `num_devices` devices: parameters are counted once, bytes as each device holds them."""

    decoder: DecoderConfig
    stored_as: str
    """Dtype of the weights, or the name of their quantisation format."""
    arithmetic: str
    """Dtype that matmuls multiply in: see `Rates.of`."""
    activation_itemsize: int
    shape: MeshShape
    rules: AxisRules
    exchange: Exchange
    num_parameters: int
    """Without LoRA adapters."""
    num_layer_weights: int
    """Parameters of the layers' matrices that a token is multiplied with: two operations per token each."""
    num_head_weights: int
    weights_bytes: int
    """Bytes on one device, those of adapters among them."""
    adapters_bytes: int
    """Bytes of LoRA adapters on one device."""
    read_bytes: int
    """Part of them that a step reads on one device: all matrices, but only a few rows of an embedding, and no vectors."""
    expert_bytes: int
    """Part of those that belongs to experts: a step of few tokens does not use all of them."""
    row_copies_bytes: int
    """Bytes of the copies of a row's state that one layer of a step makes on a device."""
    chunk_bytes: int
    """Bytes of the states of the tokens of a chunk in a selective scan."""

    @property
    def num_devices(self) -> int:
        return self.shape.num_devices

    @property
    def kv_shards(self) -> int:
        """Devices that split the KV cache; 1 if each holds all of it."""
        return cache_shards(self.decoder, self.rules)

    @property
    def state_bytes(self) -> float:
        """Bytes of the recurrent states of one request on one device; the mean if devices have requests of their own."""
        total = 0
        for group in self.decoder.cache.states:
            for array in group.arrays:
                itemsize = 4 if array.dtype == "float32" else self.activation_itemsize
                num_shards = math.prod(self.rules.count(axis) for axis in array.axes)
                total += group.num_layers * math.prod(array.shape) * itemsize // num_shards
        return total / self.rules.count("pages")

    @property
    def num_matmul_weights(self) -> int:
        return self.num_layer_weights + self.num_head_weights

    def step_bytes(self, num_tokens: int) -> float:
        """Return the bytes that a step of `num_tokens` tokens reads if each chooses its experts at random."""
        experts = self.decoder.experts
        if experts is None:
            return self.read_bytes
        are_idle = (1 - experts.num_per_token / experts.num_experts) ** num_tokens
        return self.read_bytes - are_idle * self.expert_bytes

    def attended_tokens(self, context: int) -> int:
        """Return the keys that one query at the end of `context` tokens attends to, summed over the layers."""
        return sum(self._attended(layer, context) for layer in self.decoder.layers if layer.has_kv)

    def attended_pairs(self, num_tokens: int) -> float:
        """Return the query-key pairs of a causal prompt, summed over the layers."""
        pairs = 0.0
        if self.decoder.compressed is not None:
            return num_tokens * self.attended_tokens(num_tokens // 2)  # which grows with the context, or not
        for layer in (layer for layer in self.decoder.layers if layer.has_kv):
            window = self._attended(layer, num_tokens)
            pairs += window * (num_tokens - window / 2)
        return pairs

    def _attended(self, layer: LayerConfig, context: int) -> int:
        """Return the keys that a query at the end of `context` tokens attends to in a layer with attention."""
        if self.decoder.compressed is not None:
            return self.decoder.compressed.attended(layer.compression, context)
        indexer = indexer_of(self.decoder, layer)
        most = layer.sliding_window or (None if indexer is None else indexer.num_chosen)
        return min(context, most or context)

    def _indexers(self, context: int) -> list[IndexerConfig | BlockIndexerConfig]:
        """Return the indexers of the layers, without those that choose all of `context` tokens."""
        layers = (layer for layer in self.decoder.layers if layer.has_kv and layer.index_source is None)
        found = (indexer_of(self.decoder, layer) for layer in layers)
        return [each for each in found if each is not None and context > each.num_chosen]

    def scored_numbers(self, context: int) -> int:
        """Return the numbers of keys that indexers read for one query at the end of `context` tokens, over the layers."""
        of_blocks = (layer.compression.scored_numbers(context) for layer in self.decoder.layers if layer.compression)
        return sum(context * _cached_width(indexer) for indexer in self._indexers(context)) + sum(of_blocks)

    def scoring_work(self, num_tokens: int) -> float:
        """Return the multiplications of indexers for a causal prompt on one device, which computes those of its requests. Devices
        that split KV heads share those that choose blocks for each head."""
        blocks = [layer.compression for layer in self.decoder.layers if layer.compression and layer.compression.indexer]
        work = sum(
            each.scored_numbers(num_tokens) * each.indexer.num_heads * num_tokens / 2 for each in blocks if each.indexer
        )
        for indexer in self._indexers(num_tokens):
            if isinstance(indexer, BlockIndexerConfig) and indexer.is_pooled:
                num_heads = indexer.num_heads / indexer.block_size  # tokens of a block have one score
            elif isinstance(indexer, BlockIndexerConfig):
                num_heads = indexer.num_heads / min(self.rules.count("kv_heads"), indexer.num_heads)
            else:
                num_heads = indexer.num_heads / indexer.pool_size  # tokens of a pool have one score
            work += num_heads * indexer.head_dim * num_tokens**2 / 2
        return work


def make_sizes(skeleton: ModelSkeleton, decoder: DecoderConfig | None = None) -> Sizes:
    """Count the leaves of a model, sharded as the engine would shard them.

    decoder: a config with more layers like those of `skeleton`, which then has one of each kind; None: the skeleton's own.
    """
    policy, decoder = skeleton.policy, decoder or skeleton.config
    rules, leaves = policy.rules, tuple(_repeated(skeleton, decoder))
    work = step_work(skeleton, leaves)
    of_rows, of_chunk, state = (
        *state_copies(skeleton.config, policy.backend),
        _layer_state_bytes(skeleton.config, rules),
    )
    return Sizes(
        decoder=decoder,
        stored_as=str(policy.weights) if policy.quant.name == NO_QUANTIZATION else policy.quant.name,
        arithmetic=policy.quant.format.arithmetic or ("float32" if policy.activations == jnp.float32 else "bfloat16"),
        activation_itemsize=policy.activations.itemsize,
        shape=policy.mesh,
        rules=rules,
        exchange=policy.exchange,
        num_parameters=sum(math.prod(leaf.shape) for leaf in leaves if not leaf.is_adapter) - _num_copied(decoder),
        num_layer_weights=work.num_layer_weights,
        num_head_weights=work.num_head_weights,
        weights_bytes=sharded_bytes(skeleton, leaves),
        adapters_bytes=sum(local_bytes(array, rules) for leaf in leaves if leaf.is_adapter for array in leaf.arrays),
        read_bytes=work.read_bytes,
        expert_bytes=work.expert_bytes,
        row_copies_bytes=of_rows * state,
        chunk_bytes=of_chunk * state,
    )


def _layer_state_bytes(decoder: DecoderConfig, rules: AxisRules) -> int:
    """Return the bytes of a request's largest state in one layer on a device. Windows of convolutions are small."""
    arrays = [array for group in decoder.cache.states for array in group.arrays if array.name == "state"]
    each = (4 * math.prod(array.shape) // math.prod(map(rules.count, array.axes)) for array in arrays)
    return max(each, default=0)


def sharded_bytes(skeleton: DecoderSkeleton, leaves: Iterable[LeafSpec] | None = None) -> int:
    """Return the bytes of the parameters on each device. leaves: those to count; None: all."""
    counted = skeleton.leaves if leaves is None else leaves
    return sum(local_bytes(array, skeleton.policy.rules) for leaf in counted for array in leaf.arrays)


def _repeated(skeleton: ModelSkeleton, decoder: DecoderConfig) -> Iterator[LeafSpec]:
    """Yield each leaf as often as the decoder has layers like its own."""
    layers = skeleton.config.layers
    for leaf in skeleton.leaves:
        index = None if layers == decoder.layers else _LAYER.match(leaf.name)
        yield from itertools.repeat(leaf, 1 if index is None else decoder.layers.count(layers[int(index[1])]))


def token_bytes(config: Config, decoder: DecoderConfig, platform: str) -> int:
    """Return the bytes that one more token of a long text needs in the cache."""
    return CacheSizes(kv_specs(config, decoder, platform), ()).bytes_per_token


def _num_copied(config: DecoderConfig) -> int:
    """Return the parameters of copies of KV heads, which the checkpoint does not have."""
    per_row = config.hidden_size + config.qkv_bias + (0.5 if config.qk_norm in ("whole", "each_head") else 0)
    rows = 0
    for layer in (layer for layer in config.layers if layer.has_kv and layer.latent_dim is None):
        heads, dim = config.kv_shape(layer)
        copies = config.kv_copies if layer.num_kv_heads is None else layer.kv_copies
        parts = 0 if layer.kv_source is not None else 1 + layer.has_value_projection
        rows += parts * (heads - heads // copies) * dim
    return int(rows * per_row)


def estimate_workspace(sizes: Sizes, num_tokens: int, num_rows: int) -> int:
    """Estimate the bytes for activations, states and logits of one step on one device.

    Counted are the widest point of a layer (residual, its norm, other residual streams, gate, up and gate * up; for experts these and the input
    of each that a token uses; of a selective scan what goes in and out in float32), two copies of the rows' states where no kernel updates
    them in their pool, those of the tokens of a chunk of a scan, three float32 copies of the logits for sampling, and the choices of an indexer with the scores of a tile of queries. A compiler may need several times as
    much if it copies the KV pool.
    """
    decoder, count = sizes.decoder, sizes.rules.count
    widths = (layer.intermediate_size or decoder.intermediate_size for layer in decoder.layers)
    blocks = [3 * max(widths) // count("ffn")]
    if decoder.experts is not None:
        own = decoder.hidden_size + 3 * decoder.experts.intermediate_size // count("expert_ffn")
        shared = 3 * (decoder.experts.shared_intermediate_size or 0) // count("shared_ffn")
        blocks.append(decoder.experts.num_per_token * own + shared)
    if isinstance(decoder.recurrent, MambaConfig):
        blocks.append(_SCANNED * decoder.recurrent.num_channels * 4 // sizes.activation_itemsize)
    streams = decoder.altup or decoder.hyper
    num_streams = 0 if streams is None else streams.num_streams
    width = (2 + num_streams) * decoder.hidden_size + max(blocks)
    heads, context = -(-decoder.num_kv_heads // count("kv_heads")), decoder.max_position
    indexers = (_indexer(decoder, layer) for layer in decoder.layers)
    return (
        max((_index_bytes(indexer, num_tokens, context, heads) for indexer in indexers), default=0)
        + num_tokens * width * sizes.activation_itemsize
        + num_rows * sizes.row_copies_bytes
        + sizes.chunk_bytes
        + 3 * num_rows * decoder.vocab_size // count("vocab") * 4
    )


def _indexer(decoder: DecoderConfig, layer: LayerConfig) -> IndexerConfig | BlockIndexerConfig | None:
    return indexer_of(decoder, layer) if layer.compression is None else layer.compression.indexer


def _cached_width(indexer: IndexerConfig | BlockIndexerConfig) -> int:
    return indexer.cached_width if isinstance(indexer, IndexerConfig) else indexer.head_dim


def _index_bytes(
    indexer: IndexerConfig | BlockIndexerConfig | None, num_tokens: int, context: int, num_kv_heads: int
) -> int:
    """Return the bytes of an indexer's choices in a step, and of the scores of a tile of queries, on a device with these KV heads."""
    if indexer is None:
        return 0
    if isinstance(indexer, IndexerConfig):
        return 4 * (num_tokens * indexer.num_chosen + _TILE_QUERIES * context)
    num_kv_heads = 1 if indexer.is_pooled else num_kv_heads
    return 4 * num_kv_heads * (num_tokens * indexer.num_blocks + _TILE_QUERIES * context // indexer.block_size)
