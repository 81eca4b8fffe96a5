"""Qwen4-Exp, the text part: gated delta nets, attention to blocks that have keys, gated residual streams, and embeddings of several tokens."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.hyper import HyperConfig
from jaxserve.model_config.indexer import BlockIndexerConfig
from jaxserve.model_config.recurrent import NgramConfig
from jaxserve.models.families import qwen3_5_moe
from jaxserve.models.families._common import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, num_layers
from jaxserve.models.families._experts import all_with_experts, read_qwen_experts
from jaxserve.models.families._hybrid import MAX_TAPS, hybrid_layers, layer_names, qwen_hybrid, read_delta
from jaxserve.models.families._hyper import MAX_STREAMS
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION, without_sections

DEFAULTS: Final[Mapping[str, Any]] = dict(
    qwen3_5_moe.DEFAULTS,
    num_experts=512,
    num_experts_per_tok=10,
    norm_topk_prob=True,
    hc_count=4,
    hc_lowrank=320,
    ple_conv_kernel_size=4,
    ngram_size=3,
    heads_per_ngram=8,
    ngram_vocab_size_base=20_000_000,
    make_ngram_vocab_size_divisible_by=128,
    seed=1234,
)
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "full_attention_interval": 4,
    "partial_rotary_factor": 1.0,
}
"""Defaults of further keys that published configs may leave out."""
_MAX_NGRAM: Final = 8
_LONGEST: Final = (1 << 31) - 1
"""Rows of a table at most."""
_MASK: Final = (1 << 64) - 1
_STEP, _MIX, _LAST_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele et al., 2014)."""
_SEEDS_APART: Final = 10_007
_HASHES: Final = re.compile(
    r"model\.layers\.(\d+)\.ple\.ple_embedding\.(layer_multipliers|ngram_heads_(?:vocab_sizes|offsets))"
)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gated delta nets and attention in turn, both with experts, on residual streams that every block reads through gates."""
    keys = without_sections(Keys({**DEFAULTS, **_SIZES, **hf}))
    keys.require("indexer_kv_heads", 1)
    experts = read_qwen_experts(keys, is_normalized=keys.flag("norm_topk_prob"))
    # No layer is dense, so the width of dense layers is that of experts in name only.
    keys = Keys({**keys.table, "intermediate_size": experts.intermediate_size})
    hyper = HyperConfig(
        num_streams=keys.integer("hc_count", MAX_STREAMS, low=2),
        eps=0.0,
        share_scale=2.0,
        gate_rank=keys.integer("hc_lowrank", MAX_WIDTH),
    )
    layers = _with_ngrams(keys, _layers(keys), hyper)
    config = qwen_hybrid(keys, all_with_experts(layers, experts))
    keys.integer("indexer_head_dim", MAX_HEAD_DIM, low=config.rotary_dim or config.head_dim)
    return replace(config, hyper=hyper, norm_placement="none")


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return the layers: by `layer_types`, else attention in the last of every `full_attention_interval`."""
    period = keys.integer("full_attention_interval", MAX_LAYERS)
    default = [
        "full_attention" if index % period == period - 1 else "linear_attention" for index in range(num_layers(keys))
    ]
    names = ["full_attention" if name == "indexed_attention" else name for name in layer_names(keys, default)]
    gate = keys.get("output_gate_type") or keys.get("hidden_act")
    if gate not in ("silu", "sigmoid"):
        raise keys.error("output_gate_type", "silu or sigmoid")
    delta = msgspec.structs.replace(read_delta(keys, "by_part"), gate=gate)
    size = keys.integer("indexer_compress_ratio", MAX_POSITION)
    num_blocks, rest = divmod(keys.integer("indexer_budget", MAX_POSITION), size)
    if rest or not num_blocks:
        raise keys.error("indexer_budget", f"a multiple of indexer_compress_ratio ({size})")
    blocks = BlockIndexerConfig(
        num_heads=keys.integer("indexer_n_heads", MAX_HEADS),
        head_dim=keys.integer("indexer_head_dim", MAX_HEAD_DIM),
        block_size=size,
        num_blocks=num_blocks,
        num_local=0,
        is_pooled=True,
    )
    layers = hybrid_layers(keys, names, "linear_attention", delta)
    return tuple(replace(layer, blocks=blocks) if layer.has_kv else layer for layer in layers)


def _with_ngrams(keys: Keys, layers: tuple[LayerConfig, ...], hyper: HyperConfig) -> tuple[LayerConfig, ...]:
    """Return the layers, with embeddings of several tokens in those that `ple_layer_ids` counts from 1."""
    numbers = keys.get("ple_layer_ids") or []
    linear = [index for index, layer in enumerate(layers, 1) if not layer.has_kv]
    if not isinstance(numbers, list) or any(type(number) is not int or number not in linear for number in numbers):
        raise keys.error("ple_layer_ids", "numbers of linear_attention layers, counted from 1")
    if not numbers:
        return layers
    found = dict(zip(sorted({*numbers}), _ngrams(keys, hyper), strict=False))
    return tuple(replace(layer, ngram=found.get(index)) for index, layer in enumerate(layers, 1))


def _ngrams(keys: Keys, hyper: HyperConfig) -> Iterator[NgramConfig]:
    """Yield the embeddings of the first layer that has some, of the second, and so on: their heads have different primes."""
    length = keys.integer("ngram_size", _MAX_NGRAM, low=2)
    num_heads = (length - 1) * keys.integer("heads_per_ngram", MAX_HEADS)
    width = keys.integer("hidden_size", MAX_WIDTH)
    dim = width if keys.get("ple_embed_dim") is None else keys.integer("ple_embed_dim", MAX_WIDTH)
    if dim % num_heads:
        raise keys.error("ple_embed_dim", f"a multiple of the {num_heads} heads of n-grams")
    base = keys.integer("ngram_vocab_size_base", _LONGEST // num_heads // 2)
    unit = keys.integer("make_ngram_vocab_size_divisible_by", _LONGEST)
    num_tokens = keys.integer("vocab_size", MAX_VOCAB_SIZE)
    end = keys.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    if type(end) is not int or not 0 <= end < num_tokens:
        raise keys.error("eos_token_id", "a token, which n-grams end at")
    num_taps = keys.integer("ple_conv_kernel_size", MAX_TAPS // length, low=2)
    primes = filter(_is_prime, itertools.count(base))
    for index in itertools.count():
        sizes = tuple(itertools.islice(primes, num_heads))
        num_rows = -(-sum(sizes) // unit) * unit
        if num_rows > _LONGEST:
            raise keys.error("make_ngram_vocab_size_divisible_by", f"a table of at most {_LONGEST} rows")
        seed = keys.integer("seed", _MASK, low=0) + _SEEDS_APART * index
        yield NgramConfig(
            multipliers=tuple(_multiplier(seed + _STEP * (place + 1), num_tokens) for place in range(length)),
            sizes=sizes,
            num_rows=num_rows,
            dim=dim,
            end_token=end,
            num_channels=hyper.num_streams * width,
            num_taps=num_taps,
        )


def _multiplier(state: int, num_tokens: int) -> int:
    """Return an odd number by SplitMix64 whose products with tokens are below 2^63."""
    value = (state + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _MIX) & _MASK
    value = ((value ^ (value >> 27)) * _LAST_MIX) & _MASK
    half = max(1, ((1 << 63) - 1) // num_tokens // 2)
    return 2 * ((value ^ (value >> 31)) % half) + 1


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, math.isqrt(number) + 1))


def _check_hashes(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a checkpoint stores other factors or sizes of hashes than those that follow from its config."""
    names = [found for found in map(_HASHES.fullmatch, checkpoint.tensors) if found is not None]
    layers = decoder_config(dict(checkpoint.config)).layers if names else ()
    for found in names:
        ngram = layers[int(found[1])].ngram if int(found[1]) < len(layers) else None
        if ngram is None:
            continue  # the loader names tensors of layers that have no embeddings of several tokens
        offsets = (0, *itertools.accumulate(ngram.sizes[:-1]))
        computed = {"layer_multipliers": ngram.multipliers, "ngram_heads_vocab_sizes": ngram.sizes}
        if np.asarray(checkpoint.read(found[0])).tolist() != [*computed.get(found[2], offsets)]:
            raise CheckpointError(
                f"tensor {found[0]!r}: the numbers that follow from the config expected, found others"
            )


FAMILY = Family(
    ("Qwen4ExpForCausalLM",),
    decoder_config,
    text_part_of=("Qwen4ExpForConditionalGeneration",),
    renames={
        "ple.ple_embedding.ngram_embedding": "ngram.table",
        "ple.conv1d": "ngram.last_inputs.conv1d",
        "ple": "ngram",
        "attn_hyper_connection": "attn_hc",
        "mlp_hyper_connection": "ffn_hc",
        "hyper_connection_mixer": "hc_head",
        "index_qk_proj": "qk_proj",
        "q_layernorm": "q_norm",
        "k_layernorm": "k_norm",
        "shared_expert": "shared_experts",
    },
    stacked_experts="halves",
    unused_tensors=(".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets"),
    check_tensors=_check_hashes,
)
