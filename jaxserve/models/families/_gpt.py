"""Keys of GPT-2's config that families of its time share, and their blocks: LayerNorm, and feed-forward blocks without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import MAX_WIDTH, build, num_layers
from jaxserve.models.families._keys import Keys

KEY_NAMES: Final[Mapping[str, str]] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Our names of GPT-2's keys."""
DEFAULTS: Final[Mapping[str, Any]] = {
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10_000.0,
}
"""transformers' defaults; those of GPT-2 differ in families with other activations."""
_WIDTH: Final = "intermediate_size"


def our_keys(hf: Mapping[str, Any], defaults: Mapping[str, Any], names: Mapping[str, str] = KEY_NAMES) -> Keys:
    """Return the config under our names, with the family's defaults. Without a width, feed-forward blocks are four times as wide
    as the model."""
    table = {"num_key_value_heads": None, **with_our_keys(defaults, names), **with_our_keys(hf, names)}
    keys = Keys(table, names={ours: own for own, ours in names.items()})
    if keys.get(_WIDTH) is not None:
        return keys
    return replace(keys, table={**keys.table, _WIDTH: 4 * keys.integer("hidden_size", MAX_WIDTH // 4)})


def gpt(keys: Keys, *, has_rope: bool, **settings: Any) -> DecoderConfig:
    """Build a decoder with LayerNorm and feed-forward blocks without a gate, with biases everywhere; all layers are alike.

    has_rope: False if positions have learned embeddings or none. settings: those of `build`.
    """
    layers = (LayerConfig(use_rope=has_rope),) * num_layers(keys)
    config = build(keys, layers=layers, **{"qkv_bias": True, "eps_key": "layer_norm_eps", **settings})
    return replace(config, norm_kind="layer_with_bias", attention_out_bias=True, mlp_bias=True, mlp_has_gate=False)
