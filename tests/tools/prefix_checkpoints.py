"""Tiny checkpoints of tests/models/data/vision whose prompts are seen whole."""

from __future__ import annotations

from typing import Any

from vision_checkpoints import PREPROCESSING, VisionCheckpoint, multimodal


def _paligemma(text: dict[str, Any], vision: dict[str, Any]) -> VisionCheckpoint:
    side = vision["image_size"]
    config = multimodal(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        {"rms_norm_eps": 1e-6, "rope_theta": 1e4, **text},
        {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "vision_use_head": False, **vision},
        image_token_index=3,
    )
    width = config["text_config"]["hidden_size"]
    return VisionCheckpoint(
        {**config, "projection_dim": width, "hidden_size": width, "tie_word_embeddings": True},
        {
            **PREPROCESSING,
            "image_processor_type": "SiglipImageProcessor",
            "image_seq_length": (side // vision["patch_size"]) ** 2,
            "size": {"height": side, "width": side},
        },
        "PaliGemmaProcessor",
        "<image>",
        ("<image>",),
        {"image_token": "<image>"},
        {},
    )


PREFIX_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "paligemma_tiny": _paligemma(
        {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
        {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
    ),
    "paligemma_odd_tiny": _paligemma(
        {
            "model_type": "gemma2",
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 128,
        },
        {"hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "image_size": 25, "patch_size": 5},
    ),
}
