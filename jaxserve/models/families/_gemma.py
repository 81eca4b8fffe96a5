"""Features that Gemma 2 and Gemma 3, or Gemma 3n and Gemma 4, share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import alternating_layers, build
from jaxserve.models.families._keys import Keys

DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
"""transformers' defaults that Gemma 2 and Gemma 3 share."""
PER_LAYER_NAMES: Final = {
    "per_layer_model_projection": "per_layer.projection",
    "per_layer_projection_norm": "per_layer.norm",
    "per_layer_input_gate": "per_layer.gate",
    "per_layer_projection": "per_layer.projection",
    "post_per_layer_input_norm": "per_layer.norm",
}
"""Our names of the embeddings that each layer of Gemma 3n and Gemma 4 gets."""
_COMPUTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def gemma(keys: Keys, *, pattern: int) -> DecoderConfig:
    """Sandwich norms with weights stored minus 1, embeddings times sqrt(D), scores that may be capped.

    pattern: the last of every `pattern` layers has full attention, the others a sliding window.
    """
    is_whole = has_whole_prompts(keys)
    layers = alternating_layers(keys, pattern)
    config = build(keys, layers=layers, computed=_COMPUTED, activation_key="hidden_activation")
    return replace(
        config,
        norm_placement="sandwich",
        norm_weights="offset",
        embedding_scale=config.hidden_size**0.5,
        attention_scale=keys.number("query_pre_attn_scalar") ** -0.5,
        attention_softcap=read_cap(keys, "attn_logit_softcapping"),
        logit_softcap=read_cap(keys, "final_logit_softcapping"),
        has_whole_prompts=is_whole,
    )


def has_whole_prompts(keys: Keys) -> bool:
    """Return True for the text part of PaliGemma; raise CheckpointError for other models that attend in both directions."""
    whole = keys.table.get(MULTIMODAL)
    is_whole = isinstance(whole, Mapping) and whole.get("model_type") == "paligemma"
    keys.require("use_bidirectional_attention", *((True, None) if is_whole else (False, None)))
    return is_whole


def with_wide_norms(config: DecoderConfig, sliding_theta: float | None) -> DecoderConfig:
    """Add what Gemma 3n and Gemma 4 share: norms stored whole, of values, too, embeddings times sqrt(D), and scores that are not scaled."""
    return replace(
        config,
        qk_norm="heads",
        has_value_norm=True,
        norm_placement="sandwich",
        norm_weights="wide",
        sliding_rope_theta=sliding_theta,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=1.0,
    )


def read_cap(keys: Keys, key: str) -> float | None:
    """Read a bound of scores or logits; null is none."""
    return None if keys.get(key) is None else keys.number(key)


def gemma_gguf_config(config: Mapping[str, Any], *, num_layers_of_27b: int) -> dict[str, Any]:
    """Return what no key of a GGUF file carries: the 27B models scale scores by D / N instead of H."""
    is_27b = config["num_hidden_layers"] == num_layers_of_27b
    by_width = config["hidden_size"] / config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_width if is_27b else config["head_dim"],
    }


def sharing_layers(keys: Keys, layers: tuple[LayerConfig, ...], width: int | None = None) -> tuple[LayerConfig, ...]:
    """Let the last `num_kv_shared_layers` layers read the keys and values of the last layer of their kind before them.

    width: that of their feed-forward blocks; None: the model's.
    """
    key = "num_kv_shared_layers"
    first = len(layers) - keys.integer(key, len(layers) - 1, low=0)
    sources = {layer.sliding_window: index for index, layer in enumerate(layers[:first])}
    if any(layer.sliding_window not in sources for layer in layers[first:]):
        raise keys.error(key, "a number that leaves a layer of each kind with keys and values of its own")
    return layers[:first] + tuple(
        replace(layer, kv_source=sources[layer.sliding_window], intermediate_size=width) for layer in layers[first:]
    )
