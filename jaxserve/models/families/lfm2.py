"""LFM2 and LFM2-VL (arXiv 2511.23404): gated short convolutions and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.short_conv import FINAL_NORM, TENSOR_NAMES, short_conv_config
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import ShortConvConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, MAX_WIDTH, build, num_layers
from jaxserve.models.families._experts import PART_NAMES
from jaxserve.models.families._hybrid import MAX_TAPS, hybrid_layers, layer_names
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._lfm2_vl import lfm2_vl

DEFAULTS = {key: value for key, value in COMMON_DEFAULTS.items() if key not in ("hidden_act", "rms_norm_eps")} | {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "full_attn_idxs": None,
}
VISION_MODEL = "Lfm2VlForConditionalGeneration"
RENAMES = {
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "embedding_norm": "norm",
    "feed_forward": "mlp",
    **PART_NAMES,
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "out_proj": "o_proj",
}


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with norms of query and key heads, and short convolutions in place of attention in most layers."""
    keys = read_keys(hf)
    return build_lfm2(Keys({**keys.table, "intermediate_size": _width(keys)}), lfm2_layers(keys))


def read_keys(hf: dict[str, Any]) -> Keys:
    """Return the keys with the names of other families, and with those of older configs."""
    named = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
    old = {key: hf[other] for key, other in named.items() if other in hf}
    keys = {**DEFAULTS, "hidden_act": "silu", "max_position_embeddings": 128_000, **hf, **old}
    return Keys({**keys, "rms_norm_eps": keys["norm_eps"]})


def lfm2_layers(keys: Keys) -> tuple[LayerConfig, ...]:
    """Return layers of which those in `layer_types`, or those not in `full_attn_idxs`, have a convolution."""
    count, attending = num_layers(keys), keys.get("full_attn_idxs")
    if attending is not None and not isinstance(attending, list):
        raise keys.error("full_attn_idxs", "a list of layers")
    default = ["full_attention" if attending is None or i in attending else "conv" for i in range(count)]
    conv = ShortConvConfig(
        num_channels=keys.integer("hidden_size", MAX_WIDTH),
        num_taps=keys.integer("conv_L_cache", MAX_TAPS, low=2),
        has_bias=keys.flag("conv_bias"),
    )
    return hybrid_layers(keys, layer_names(keys, default), "conv", conv)


def build_lfm2(keys: Keys, layers: tuple[LayerConfig, ...], *computed: str) -> DecoderConfig:
    """Read the keys that the models with and without experts share."""
    return replace(build(keys, layers=layers, qkv_bias=False, computed=computed), qk_norm="heads")


def _width(keys: Keys) -> int:
    """Return F: by default two thirds of the declared width, rounded up."""
    width = keys.integer("intermediate_size", MAX_WIDTH)
    if not keys.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if keys.get("block_ffn_dim_multiplier") is not None:
        step = keys.integer("block_multiple_of", MAX_WIDTH)
        width = -(-int(keys.number("block_ffn_dim_multiplier") * width) // step) * step
    return width


def gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return short convolutions, and the keys that other families name differently. `feed_forward_length` is F itself."""
    return {
        **no_window(keys, config),
        **short_conv_config(keys, config),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


FAMILY = Family(
    ("Lfm2ForCausalLM",),
    decoder_config,
    text_part_of=(VISION_MODEL,),
    read_vision=lfm2_vl,
    text_model_types=("lfm2", None),
    renames=RENAMES,
    gguf=GGUFArchitecture("lfm2", has_mixers=True, tensor_names=TENSOR_NAMES, top_names=FINAL_NORM, config=gguf_config),
)
