"""Qwen3.5 and Qwen3.6, the dense models: the text part of their checkpoints, and their tower; and that of MiniCPM-V 4.6."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import GGUFArchitecture, GGUFKeys, no_window
from jaxserve.checkpoint.gguf.delta_net import TENSOR_NAMES, delta_config
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.families._hybrid import QWEN_DEFAULTS, QWEN_SIZES, qwen_hybrid, qwen_layers
from jaxserve.models.families._keys import Keys
from jaxserve.models.families._minicpm_v import minicpm_v
from jaxserve.models.families._rope import without_sections
from jaxserve.models.families._vision import QWEN3_5_SECTIONS, by_model_type, qwen_vision

DEFAULTS = dict(
    QWEN_DEFAULTS,
    num_key_value_heads=4,
)
_SIZES: Mapping[str, Any] = {
    **QWEN_SIZES,
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}
"""Defaults of further keys that published multimodal configs may leave out."""
_QWEN = partial(qwen_vision, sections=QWEN3_5_SECTIONS)


def decoder_config(hf: dict[str, Any]) -> DecoderConfig:
    """Qwen3-Next without experts, with a projection for each part of a gated delta net. Texts have one position per
    token, so rotation by sections (M-RoPE), which the tower's config holds, is plain rotation."""
    keys = without_sections(Keys({**DEFAULTS, **_SIZES, **hf}))
    return qwen_hybrid(keys, qwen_layers(keys, "by_part"))


def gguf_config(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of gated delta nets and of partial rotation, dense or with experts."""
    rotation = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    return {**no_window(keys, config), **delta_config(keys, config), **rotation}


FAMILY = Family(
    ("Qwen3_5ForCausalLM",),
    decoder_config,
    text_part_of=("Qwen3_5ForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration"),
    read_vision=by_model_type({"qwen3_5": _QWEN, "qwen3_vl": _QWEN, "minicpmv4_6": minicpm_v}),
    mtp="module",
    gguf=GGUFArchitecture(
        "qwen35",
        has_partial_rotary=True,
        norm_offset=1.0,
        tensor_names=TENSOR_NAMES,
        config=gguf_config,
    ),
)
