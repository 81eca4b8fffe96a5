"""ModernBERT's decoders, such as Ettin's (arXiv 2507.11412)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families import modernbert
from jaxserve.models.families._common import MAX_LAYERS, build, layer_types, num_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._rope import MAX_POSITION, by_layer_type

_PERIOD: Final = "global_attn_every_n_layers"
_LOCAL: Final = "rope_local_base_freq"
_KEY_NAMES: Final = {**modernbert.KEY_NAMES, "local_rope_theta": _LOCAL}
DEFAULTS: Final[Mapping[str, Any]] = {
    **{
        key: modernbert.DEFAULTS[key]
        for key in ("hidden_activation", "norm_eps", "norm_bias", "attention_bias", "mlp_bias")
    },
    **{key: modernbert.DEFAULTS[key] for key in ("local_attention", "rope_theta", "tie_word_embeddings")},
    "classifier_bias": False,
    "classifier_activation": "gelu",
    "decoder_bias": True,
    _LOCAL: 10_000.0,
}
_OLD: Final = {"num_key_value_heads": None, _PERIOD: 3}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm before each block but the first attention, gated GELU, windows of half of `local_attention` with another rope base in two
    layers of three, and a layer with a norm before the output head."""
    keys = Keys(
        {**DEFAULTS, **_OLD, **with_our_keys(hf, _KEY_NAMES)}, names={ours: own for own, ours in _KEY_NAMES.items()}
    )
    keys.require("rope_scaling", None)
    window = keys.integer("local_attention", MAX_POSITION, low=2) // 2
    default = tuple(index % keys.integer(_PERIOD, MAX_LAYERS) != 0 for index in range(num_layers(keys)))
    layers = [LayerConfig(window if is_sliding else None) for is_sliding in layer_types(keys, window, default)]
    layers[0] = replace(layers[0], norm_placement="pre_mlp")
    keys, sliding_theta = by_layer_type(keys, keys.number(_LOCAL, low=1.0))
    config = build(
        keys, layers=tuple(layers), activation_key="hidden_activation", eps_key="norm_eps", computed=("mlp_bias",)
    )
    return replace(
        config,
        norm_kind="layer_with_bias" if keys.flag("norm_bias") else "layer",
        embedding_norm="inputs",
        sliding_rope_theta=sliding_theta,
        lm_head_bias=keys.flag("decoder_bias"),
        logit_layer=modernbert.normed_layer(keys, config, "logit_layer"),
    )


def _renames(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the name of the bias of a head that is the embedding matrix."""
    return {"decoder.bias": "model.embed_tokens.bias"} if config.get("tie_word_embeddings", True) else {}


FAMILY = Family(
    ("ModernBertDecoderForCausalLM",),
    decoder_config,
    renames={**modernbert.RENAMES, "lm_head": "logit_layer", "decoder": "lm_head", "attn": "self_attn"},
    config_renames=_renames,
    key_names=_KEY_NAMES,
)
