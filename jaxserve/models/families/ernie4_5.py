"""ERNIE 4.5, the dense models, and PaddleOCR-VL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, full_layers, with_sizes
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._paddleocr import paddleocr
from jaxserve.models.families._rope import without_sections

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    use_bias=False,
    tie_word_embeddings=True,
)
_MULTIMODAL: Mapping[str, Any] = {
    "vocab_size": 103_424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "max_position_embeddings": 131_072,
}
"""transformers' defaults of PaddleOCR-VL's text part."""
_FIXED: Mapping[str, Any] = {"rope_is_neox_style": True, "use_3d_rope": True, "compression_ratio": 1.0}
"""Keys of published PaddleOCR-VL checkpoints that change the computation in the code beside them, with the values that they have."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with adjacent rotary pairs, and one flag for the biases of all matmuls; PaddleOCR-VL's pairs are halves of a head apart."""
    keys = without_sections(Keys({**DEFAULTS, **with_sizes(_MULTIMODAL, hf)}))
    config = ernie(keys, full_layers(keys))
    if MULTIMODAL not in hf:
        return config
    for key, value in _FIXED.items():
        keys.require(key, value, None)
    return replace(config, rotary_pairs="halves")


def ernie(keys: Keys, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    """Build the features that all models of ERNIE 4.5 share."""
    has_bias = keys.flag("use_bias")
    config = build(keys, layers=layers, qkv_bias=has_bias)
    return replace(config, attention_out_bias=has_bias, mlp_bias=has_bias, rotary_pairs="adjacent")


def _gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return no_window(keys, config) | {"use_bias": "blk.0.ffn_down.bias" in keys.file.tensors}


FAMILY = Family(
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    decoder_config,
    text_part_of=("PaddleOCRVLForConditionalGeneration",),
    text_model_types=("paddleocr_vl_text", "paddleocr_vl", None),
    read_vision=paddleocr,
    gguf=GGUFArchitecture("ernie4_5", config=_gguf_config),
)
