"""ModernBERT (arXiv 2412.13663), an encoder with the layers of decoders: GTE, nomic and other models that embed, and cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.renamed import with_our_keys
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.models.families._common import MAX_LAYERS, build, layer_types, num_layers, read_activation
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._labels import label_head
from jaxserve.models.families._rope import MAX_POSITION, by_layer_type
from jaxserve.types import Pooling

KEY_NAMES: Final = {"global_rope_theta": "rope_theta"}
DEFAULTS: Final[Mapping[str, Any]] = {
    "num_key_value_heads": None,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "classifier_pooling": "cls",
    "classifier_bias": False,
    "classifier_activation": "gelu",
}
RENAMES: Final = {
    "embeddings.tok_embeddings": "embed_tokens",
    "embeddings.norm": "embed_norm",
    "final_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn.Wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.Wi": "mlp.gate_up_proj",
    "mlp.Wo": "mlp.down_proj",
}
_SCORER: Final = "ModernBertForSequenceClassification"


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """LayerNorm before each block but the first attention, gated GELU, and attention in both directions: of one layer of three over the
    whole text, else in a window with another rope base."""
    keys = Keys({**DEFAULTS, **with_our_keys(hf, KEY_NAMES)}, names={"rope_theta": "global_rope_theta"})
    keys.require("rope_scaling", None)
    keys.require("position_embedding_type", "absolute", "rope", None)  # published configs name it, and nothing reads it
    period, window = (
        keys.integer("global_attn_every_n_layers", MAX_LAYERS),
        keys.integer("local_attention", MAX_POSITION),
    )
    default = tuple(index % period != 0 for index in range(num_layers(keys)))
    layers = [LayerConfig(window // 2 + 1 if is_sliding else None) for is_sliding in layer_types(keys, window, default)]
    layers[0] = replace(layers[0], norm_placement="pre_mlp")
    keys, sliding_theta = by_layer_type(keys, keys.number("local_rope_theta", low=1.0))
    config = build(
        keys, layers=tuple(layers), activation_key="hidden_activation", eps_key="norm_eps", computed=("mlp_bias",)
    )
    return replace(
        config,
        norm_kind="layer_with_bias" if keys.flag("norm_bias") else "layer",
        embedding_norm="inputs",
        sliding_rope_theta=sliding_theta,
        is_bidirectional=True,
        head=_label_head(keys, config) if hf["architectures"][0] == _SCORER else None,
    )


def normed_layer(keys: Keys, config: DecoderConfig, name: str) -> HeadLayer:
    """Read the layer with a norm before the last matrix: `name` is its module."""
    return HeadLayer(
        f"{name}.dense",
        config.hidden_size,
        config.hidden_size,
        has_bias=keys.flag("classifier_bias"),
        activation=read_activation(keys, "classifier_activation"),
        norm=f"{name}.norm",
        norm_eps=config.norm_eps,
        norm_has_bias=keys.flag("norm_bias"),
    )


def _label_head(keys: Keys, config: DecoderConfig) -> EmbeddingHead:
    """Return the head of a cross-encoder or classifier: a layer with a norm, and the labels."""
    poolings: Mapping[Any, Pooling] = {"cls": "cls", "mean": "mean"}
    pooling = keys.get("classifier_pooling")
    if pooling not in poolings:
        raise keys.error("classifier_pooling", " or ".join(poolings))
    inner = normed_layer(keys, config, "head")
    return label_head(keys, (inner, HeadLayer("classifier", config.hidden_size, 1)), poolings[pooling])


FAMILY = Family(
    ("ModernBertModel", _SCORER),
    decoder_config,
    renames={**RENAMES, "attn.Wqkv": "self_attn.qkv_proj"},
    key_names=KEY_NAMES,
    only_embeds=True,
)
