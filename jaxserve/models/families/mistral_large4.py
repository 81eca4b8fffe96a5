"""Mistral Large 4, without its images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.models.families import _latent
from jaxserve.models.families._common import MAX_LAYERS, full_layers
from jaxserve.models.families._experts import PART_NAMES, dense_or_sparse, read_groups
from jaxserve.models.families._indexer import indexer_kinds, with_indexer, without_indexer
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._latent import latent_decoder, read_deepseek_experts
from jaxserve.models.families.smollm3 import rope_layers

_CAP: Final = "final_logit_softcapping"
_KV_HEADS: Final = "num_key_value_heads"
_SOURCES: Final = "kv_source_layers"
DEFAULTS = {
    **{key: value for key, value in _latent.DEFAULTS.items() if key != "q_lora_rank"},
    _KV_HEADS: 64,
    "rms_norm_eps": 1e-5,
    "qk_nope_head_dim": 64,
    "moe_intermediate_size": 6144,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    _CAP: 30.0,
}
_SCHEDULES: Final = {"index_topk_freq": 1, "index_skip_topk_offset": 2, "no_rope_layer_interval": 4}
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Sparse attention over latent vectors, which some layers take from an earlier one, with learned rotary frequencies and factors on
    queries by position, and softmax-routed experts in groups."""
    keys = Keys({**DEFAULTS, **_SCHEDULES, "rope_interleave": True, "max_position_embeddings": 1_048_576, **hf})
    keys.require("q_lora_rank", None)
    keys.require("rope_interleave", True)
    keys.require("norm_topk_prob", True, None)
    keys.require(_KV_HEADS, keys.get("num_attention_heads"), None)
    keys.require("rope_scaling", None)
    if keys.get("rope_parameters") is None:
        keys = Keys({**keys.table, "rope_parameters": _ROPE})
    dense = without_indexer(Keys({**keys.table, "q_lora_rank": None, _CAP: None}))
    experts = read_deepseek_experts(dense, _with_router, is_normalized=True)
    count = len(full_layers(dense))
    dense = Keys(
        {**dense.table, "first_k_dense_replace": min(dense.integer("first_k_dense_replace", MAX_LAYERS, low=0), count)}
    )
    config = latent_decoder(dense, dense_or_sparse(dense, full_layers(dense), experts))
    assert config.latent is not None, "a decoder with latent attention"
    latent = replace(config.latent, norm_eps=config.norm_eps, has_own_keys_without_rope=True)
    config = replace(
        config,
        layers=_with_sources(keys, config.layers),
        latent=latent,
        has_position_scales=True,
        has_learned_frequencies=True,
        logit_softcap=keys.number(_CAP),
    )
    kinds = indexer_kinds(keys, count)
    return with_indexer(keys, config, has_adjacent_pairs=True, kinds=kinds, reads_inputs=True)


def _with_router(keys: Keys, experts: ExpertsConfig) -> ExpertsConfig:
    return replace(read_groups(keys, experts), weight_scale=keys.number("routed_scaling_factor"))


def _with_sources(keys: Keys, layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    """Return layers of which some do not rotate, and some read the vectors of an earlier layer.

    transformers keeps the vectors of the last layer with rope that others read, and of the last one without: a source must be that.
    """
    layers = tuple(replace(layer, use_rope=rotates) for layer, rotates in zip(layers, rope_layers(keys), strict=True))
    sources = [*range(len(layers))] if keys.get(_SOURCES) is None else keys.get(_SOURCES)
    if not isinstance(sources, list) or len(sources) != len(layers) or any(type(each) is not int for each in sources):
        raise keys.error(_SOURCES, f"a layer for each of the {len(layers)} layers")
    found, kept = list[LayerConfig](), dict[bool, int]()
    for index, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        if source == index:
            kept |= {layer.use_rope: index} if index in sources[index + 1 :] else {}
        elif source != kept.get(layer.use_rope):
            raise keys.error(
                _SOURCES, f"for layer {index} itself, or the last source before it that rotates as it does"
            )
        found.append(layer if source == index else replace(layer, kv_source=source))
    return tuple(found)


FAMILY = Family(
    ("MistralLarge4TextModel",),
    decoder_config,
    text_part_of=("MistralLarge4ForConditionalGeneration",),
    renames={
        "mlp.gate.": "gate.",
        "mlp.experts.": "experts.",
        "mlp.shared_experts.": "shared_experts.",
        "attention.wq": "self_attn.q_proj",
        "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention.wo": "self_attn.o_proj",
        "ssmax_scaling.s": "softmax_scaling.scale",
        "ssmax_scaling.b": "softmax_scaling.bias",
        "attention": "self_attn",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
        "gate": "mlp.gate",
        "experts": "mlp.experts",
        "shared_experts": "mlp.shared_experts",
        **PART_NAMES,
        "tok_embeddings": "embed_tokens",
        "lerope": "rotary_emb",
        "output": "lm_head",
    },
    stacked_experts="halves",
)
