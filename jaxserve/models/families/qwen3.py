"""Qwen3 and Qwen3-VL, the dense models, and InternVL models, Qianfan-OCR and LightOnOCR with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout
from jaxserve.checkpoint.renamed import MULTIMODAL
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, qwen_layers
from jaxserve.models.families._internvl import internvl
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._pixtral import pixtral
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._vision import by_model_type, qwen_vision

DEFAULTS = dict(
    COMMON_DEFAULTS,
    num_key_value_heads=32,
    head_dim=128,
    attention_bias=False,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
)


_LIGHTON: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
"""transformers' defaults of LightOnOCR."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with RMSNorm of each query and key head; `head_dim` defaults to 128, not D / N."""
    own = _LIGHTON if hf.get(MULTIMODAL, {}).get("model_type") == "lighton_ocr" else {}
    keys = without_sections(Keys({**DEFAULTS, **own, **hf}))
    config = build(keys, layers=qwen_layers(keys), computed=("is_causal",))
    return replace(config, qk_norm="heads")


FAMILY = Family(
    ("Qwen3ForCausalLM",),
    decoder_config,
    text_part_of=(
        "Qwen3VLForConditionalGeneration",
        "Cosmos3OmniForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "QianfanOCRForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "LightOnOCRForConditionalGeneration",
    ),
    text_model_types=("qwen3", "qwen3_vl", "qwen3_vl_text", None),
    read_vision=by_model_type(
        {
            "qwen3_vl": qwen_vision,
            "cosmos3_omni": qwen_vision,
            "internvl": internvl,
            "qianfan_ocr": internvl,
            "lighton_ocr": pixtral,
            "mistral3": pixtral,
        }
    ),
    gguf=GGUFArchitecture("qwen3", other_names=("qwen3vl",), has_bias_flags=True),
    maxtext=MaxTextLayout(),
)
