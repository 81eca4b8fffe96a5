"""GPT-Neo (EleutherAI)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families import _gpt, gpt2
from jaxserve.models.families._common import num_layers
from jaxserve.models.families._gpt import gpt, our_keys
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION

_TYPES: Final = "attention_types"
_KEY_NAMES: Final = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
DEFAULTS = {
    **{key: value for key, value in _gpt.DEFAULTS.items() if key in _KEY_NAMES},
    "window_size": 256,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Learned embeddings of positions, LayerNorm, scores without a factor, and a window in every second layer."""
    keys = our_keys(hf, {**DEFAULTS, "intermediate_size": None}, _KEY_NAMES)
    config = gpt(keys, has_rope=False, qkv_bias=False)
    window = keys.integer("window_size", MAX_POSITION)
    layers = tuple(
        replace(layer, sliding_window=window if kind == "local" else None)
        for layer, kind in zip(config.layers, _kinds(keys), strict=True)
    )
    return replace(config, layers=layers, first_position_row=0, attention_scale=1.0)


def _kinds(keys: Keys) -> list[str]:
    """Read the kinds of the layers: lists of kinds, each with the times that it is repeated."""
    count, groups = num_layers(keys), keys.get(_TYPES)
    groups = [[["global", "local"], 12]] if groups is None else groups
    try:
        kinds = [kind for names, times in groups for kind in [*names] * times]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != count or not {*kinds} <= {"global", "local"}:
        raise keys.error(_TYPES, f"lists of global and local with the times of each, {count} layers together")
    keys.require("attention_layers", kinds, None)
    return kinds


FAMILY = Family(
    ("GPTNeoForCausalLM",),
    decoder_config,
    renames={
        "attn.attention": "self_attn",
        **gpt2.RENAMES,
        "out_proj": "o_proj",
    },
    key_names=_KEY_NAMES,
    unused_tensors=(".attn.attention.bias", ".attn.attention.masked_bias"),
)
