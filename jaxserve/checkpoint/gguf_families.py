"""Keys that only some architectures have, as their `config.json` would spell them.

What no key carries is what llama.cpp takes for granted of an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from jaxserve.checkpoint.gguf_keys import GGUFKeys

_WINDOW: Final = "attention.sliding_window"
_PATTERN: Final = "attention.sliding_window_pattern"
_NUM_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""Of the models that score with D / N in the place of H."""

Own = Callable[[GGUFKeys, Mapping[str, Any]], dict[str, Any]]


def own_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the architecture's own keys add to, or replace in, the `config` that all have."""
    return _OWN.get(keys.architecture, _without_window)(keys, config)


def _without_window(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    if keys.get(_WINDOW):
        keys.fail(_WINDOW, "none for this architecture", keys.get(_WINDOW))
    return {}


def _llama(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """A llama file with a window is a Mistral; the window counts the query itself in both vocabularies."""
    if not keys.get(_WINDOW):
        return {}
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": keys.integer(_WINDOW),
    }


def _phi3(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"sliding_window": keys.integer(_WINDOW) if keys.get(_WINDOW) else None}
    original = (config.get("rope_scaling") or {}).get("original_max_position_embeddings")
    return own if original is None else own | {"original_max_position_embeddings": original}  # the outer key wins


def _gemma2(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    if keys.number("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        keys.fail("rope.freq_base_swa", "the base of all layers", keys.get("rope.freq_base_swa"))
    return _gemma(keys, config) | {
        "sliding_window": keys.integer(_WINDOW, 4096),
        "layer_types": _layer_types(keys, config, 2),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    slides, cap = bool(keys.get(_WINDOW)), "final_logit_softcapping"
    return _gemma(keys, config) | {
        "sliding_window": keys.integer(_WINDOW) if slides else None,
        "layer_types": _layer_types(keys, config, 6 if slides else 1),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        cap: keys.number(cap) if keys.has(cap) else None,
    }


def _gemma(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == _NUM_LAYERS_OF_27B[keys.architecture]
    by_width = config["hidden_size"] / config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_width if is_27b else config["head_dim"],
    }


def _olmo2(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """With a window it is OLMo 3, of whose angles only those of layers that see everything are scaled."""
    if not keys.get(_WINDOW):
        return {}
    theta = config["rope_theta"]
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": keys.integer(_WINDOW),
        "layer_types": _layer_types(keys, config, 4),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": theta},
            "sliding_attention": {"rope_theta": keys.number("rope.freq_base_swa", theta)},
        },
        "rope_scaling": None,
    }


def _granite(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    if keys.get("rope.scaling.finetuned") is False:
        keys.fail("rope.scaling.finetuned", "true or none: positions are not left out", False)
    return _without_window(keys, config) | {
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _layer_types(keys: GGUFKeys, config: Mapping[str, Any], period: int) -> list[str]:
    """Layer by layer, or of so many layers the last sees everything."""
    count, stored = config["num_hidden_layers"], keys.get(_PATTERN)
    if isinstance(stored, list):
        if len(stored) != count or not all(isinstance(slides, bool) for slides in stored):
            keys.fail(_PATTERN, f"true or false for each of the {count} layers", stored)
        slides = stored
    else:
        period = keys.integer(_PATTERN, period)
        slides = [(layer + 1) % period != 0 for layer in range(count)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides]


_OWN: Final[Mapping[str, Own]] = {
    "llama": _llama,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "granite": _granite,
}
