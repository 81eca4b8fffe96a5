"""Gemma 3n: the text models, and the text part of its multimodal models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import SANDWICH_NORMS, GGUFArchitecture, GGUFKeys
from jaxserve.checkpoint.gguf.per_layer import (
    STREAMS,
    TENSOR_NAMES,
    TOP_NAMES,
    embeddings_config,
    widths_config,
    windows_config,
)
from jaxserve.model_config.altup import AltUpConfig
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import (
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    build,
    layer_types,
    num_layers,
    read_window,
    sliding_layers,
)
from jaxserve.models.families._gemma import PER_LAYER_NAMES, read_cap, sharing_layers, with_wide_norms
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import by_layer_type

DEFAULTS: Final[Mapping[str, Any]] = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "attention_bias": False,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 15,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "activation_sparsity_pattern": None,
}
"""transformers' defaults."""
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "max_position_embeddings": 32_768,
}
"""Defaults of further keys."""
_PATTERN: Final = 5
"""By default the last of so many layers has full attention."""
_NUM_SPARSE: Final = 10
_SPARSITY: Final = 0.95
"""By default so many layers of a larger number have sparse activations."""
_MAX_STREAMS: Final = 64
_RENAMES: Final = {
    "embed_tokens_per_layer": "per_layer.embed_tokens",
    **PER_LAYER_NAMES,
    "altup_projections": "altup.projections",
    "altup_unembed_projections": "altup.unembed_projections",
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Gemma 3 with several residual streams, a low-rank residual, embeddings for each layer, layers that read others' keys
    and values, and sparse activations in the first layers."""
    keys = Keys({**DEFAULTS, **_SIZES, **hf})
    keys, sliding_theta = by_layer_type(keys, keys.number("rope_local_base_freq", low=1.0))
    keys = _with_one_width(keys)
    config = build(
        keys, layers=_layers(keys), computed=("final_logit_softcapping",), activation_key="hidden_activation"
    )
    vocab = keys.integer("vocab_size_per_layer_input", MAX_VOCAB_SIZE)
    return replace(
        with_wide_norms(config, sliding_theta),
        logit_softcap=read_cap(keys, "final_logit_softcapping"),
        per_layer_dim=keys.integer("hidden_size_per_layer_input", MAX_WIDTH),
        per_layer_vocab_size=None if vocab == config.vocab_size else vocab,
        altup=_altup(keys),
        laurel_rank=keys.integer("laurel_rank", MAX_WIDTH),
    )


def _with_one_width(keys: Keys) -> Keys:
    """Return keys with the width of all feed-forward blocks, of which files may have a list."""
    key = "intermediate_size"
    widths = keys.get(key)
    if not isinstance(widths, list):
        return keys
    if len(widths) != num_layers(keys) or any(type(each) is not int or each != widths[0] for each in widths):
        raise keys.error(key, "one width for all layers")
    return Keys({**keys.table, key: widths[0]}, keys.prefix)


def _layers(keys: Keys) -> tuple[LayerConfig, ...]:
    count, window = num_layers(keys), read_window(keys)
    if window is None:
        raise keys.error("sliding_window", "an integer from 1 on")
    default = tuple(bool((index + 1) % _PATTERN) for index in range(count))
    layers = sliding_layers(keys, window, layer_types(keys, window, default))
    return tuple(
        replace(layer, activation_sparsity=sparsity)
        for layer, sparsity in zip(sharing_layers(keys, layers), _sparsities(keys, count), strict=True)
    )


def _sparsities(keys: Keys, count: int) -> tuple[float, ...]:
    key, num_sparse = "activation_sparsity_pattern", _NUM_SPARSE if count > _NUM_SPARSE else 0
    values = keys.get(key)
    if values is None:
        return (_SPARSITY,) * num_sparse + (0.0,) * (count - num_sparse)
    if not isinstance(values, list) or len(values) != count or not all(map(_is_sparsity, values)):
        raise keys.error(key, f"a list of {count} numbers from 0 to below 1")
    return tuple(map(float, values))


def _is_sparsity(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _altup(keys: Keys) -> AltUpConfig:
    count = keys.integer("altup_num_inputs", _MAX_STREAMS, low=2)
    return AltUpConfig(
        num_streams=count,
        active=keys.integer("altup_active_idx", count - 1, low=0),
        scales_active=keys.flag("altup_correct_scale"),
    )


_GGUF_NAMES: Final = {
    **SANDWICH_NORMS,
    **TENSOR_NAMES,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GGUF_SPARSITY: Final = "activation_sparsity_scale"


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of all layers, which have one width. llama.cpp caps logits at 30 without a key."""
    widths_config(keys, config, 0)
    cap, left = "final_logit_softcapping", keys.file.tensors.get("blk.0.laurel_l.weight")
    return {
        **windows_config(keys, config, _PATTERN, config.get("rope_scaling") or {"rope_type": "default"}),
        **embeddings_config(keys, config),
        "altup_num_inputs": keys.integer("altup.num_inputs", minimum=2),
        "altup_active_idx": keys.integer("altup.active_idx", minimum=0),
        "laurel_rank": DEFAULTS["laurel_rank"] if left is None else left.shape[0],
        "activation_sparsity_pattern": _gguf_sparsities(keys, config["num_hidden_layers"]),
        cap: keys.number(cap, DEFAULTS[cap]),
    }


def _gguf_sparsities(keys: GGUFKeys, count: int) -> list[float] | None:
    """Return the fraction of activations that are left out for each layer: the file has its standard deviations above the mean."""
    scales = keys.get(_GGUF_SPARSITY)
    if scales is None:
        return None
    if not isinstance(scales, list) or len(scales) != count or not all(isinstance(scale, float) for scale in scales):
        keys.fail(_GGUF_SPARSITY, f"a number for each of the {count} layers", scales)
    return [round(NormalDist().cdf(scale), 6) for scale in scales]


FAMILY = Family(
    ("Gemma3nForCausalLM",),
    decoder_config,
    text_part_of=("Gemma3nForConditionalGeneration",),
    renames=_RENAMES,
    gguf=GGUFArchitecture(
        "gemma3n",
        varies_by_layer=True,
        tensor_names=_GGUF_NAMES,
        top_names={**TOP_NAMES, **STREAMS},
        config=_gguf_config,
    ),
)
