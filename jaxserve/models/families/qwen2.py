"""Qwen2 and Qwen2.5, Qwen2-VL and Qwen2.5-VL, VideoLLaMA 3, LLaVA and InternVL models with them, and MiMo-7B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout
from jaxserve.checkpoint.renamed import MULTIMODAL, TIED
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._common import COMMON_DEFAULTS, build, qwen_layers, with_sizes
from jaxserve.models.families._internvl import internvl
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._llava import llava
from jaxserve.models.families._ovis import ovis2
from jaxserve.models.families._qwen2_vision import qwen2_vision
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._video_llama3 import video_llama3
from jaxserve.models.families._vision import by_model_type

DEFAULTS = dict(
    COMMON_DEFAULTS, num_key_value_heads=32, use_sliding_window=False, sliding_window=4096, max_window_layers=28
)
_SIZES: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 32_768,
}
"""transformers' defaults of further keys, which multimodal configs may leave out."""


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Llama with biases of q, k and v (always) and none of the output projection."""
    is_tied = hf.get(MULTIMODAL, {}).get("model_type") == "ovis2" and TIED not in hf[MULTIMODAL]
    tied = {TIED: True} if is_tied else {}  # as transformers, whatever the text part says
    keys = without_sections(Keys({**DEFAULTS, **with_sizes(_SIZES, hf), **tied}))
    keys.require("attention_bias", True, None)
    if MULTIMODAL not in hf:
        keys.require("use_mrope", False, None)
    return build(keys, layers=qwen_layers(keys), qkv_bias=True, computed=("is_causal",))


FAMILY = Family(
    ("Qwen2ForCausalLM", "MiMoForCausalLM"),
    decoder_config,
    mtp="mimo",
    text_part_of=(
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "VideoLlama3ForConditionalGeneration",
    ),
    text_model_types=("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", None),
    read_vision=by_model_type(
        {
            "qwen2_vl": qwen2_vision,
            "qwen2_5_vl": qwen2_vision,
            "llava": llava,
            "llava_next": llava,
            "llava_onevision": llava,
            "internvl": internvl,
            "ovis2": ovis2,
            "video_llama_3": video_llama3,
        }
    ),
    gguf=GGUFArchitecture("qwen2", other_names=("qwen2vl",)),
    maxtext=MaxTextLayout(),
)
