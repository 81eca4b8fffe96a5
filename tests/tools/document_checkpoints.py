"""Tiny checkpoints of tests/models/data/vision that read documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from later_vision_checkpoints import CHUNKS, glm, internvl, pixtral
from vision_checkpoints import PREPROCESSING, VisionCheckpoint, multimodal


def _paddle(text: dict[str, Any], vision: dict[str, Any], merge: int) -> VisionCheckpoint:
    return VisionCheckpoint(
        multimodal(
            "PaddleOCRVLForConditionalGeneration",
            "paddleocr_vl",
            {"model_type": "paddleocr_vl_text", "rms_norm_eps": 1e-5, **text},
            {
                "model_type": "paddleocr_vl_vision",
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 44,
                "patch_size": 8,
                "spatial_merge_size": merge,
                **vision,
            },
            image_token_id=3,
            video_token_id=6,
            vision_start_token_id=4,
            vision_end_token_id=5,
        ),
        {
            **PREPROCESSING,
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "merge_size": merge,
            "min_pixels": 1024,
            "max_pixels": 3072,
            "patch_size": vision.get("patch_size", 8),
            "temporal_patch_size": 1,
        },
        "PaddleOCRVLProcessor",
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"),
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        {},
    )


def _lighton(text: dict[str, Any], vision: dict[str, Any], merge: int, longest: int, **keys: Any) -> VisionCheckpoint:
    made = pixtral(
        {"model_type": "qwen3", "rms_norm_eps": 1e-6, **text},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **vision},
        merge,
        longest,
        ("LightOnOcrForConditionalGeneration", "lighton_ocr"),
    )
    named = {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"}
    config = {
        key: value for key, value in made.config.items() if key not in ("image_token_index", "vision_feature_layer")
    }
    return replace(
        made,
        config={**config, "image_token_id": 3, **keys},
        processor={**made.processor, "patch_size": vision["patch_size"] * merge},
        processor_class="LightOnOcrProcessor",
        placeholder="<|image_pad|>",
        markers=tuple(named.values()),
        named_tokens=named,
    )


def _qianfan(text: dict[str, Any], vision: dict[str, Any], tile: int, patch: int) -> VisionCheckpoint:
    made = internvl({"model_type": "qwen3", "rms_norm_eps": 1e-6, **text}, vision, tile, patch)
    names = ("context_image_token", "start_image_token", "end_image_token")
    named = {name: made.named_tokens[name] for name in names}
    config = {**made.config, "architectures": ["QianfanOCRForConditionalGeneration"], "model_type": "qianfan_ocr"}
    config["vision_config"] = {**config["vision_config"], "model_type": "qianfan_ocr_vision"}
    return replace(
        made,
        config=config,
        processor_class="QianfanOCRProcessor",
        placeholder="<image>",
        markers=tuple(named.values()),
        named_tokens=named,
        processor_keys={"image_seq_length": made.processor_keys["image_seq_length"]},
    )


def _docling(text: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any], **keys: Any) -> VisionCheckpoint:
    tiles = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
    side = vision["image_size"]
    return VisionCheckpoint(
        {
            **multimodal(
                "GraniteDoclingForConditionalGeneration",
                "granite_docling",
                {"model_type": "granite_docling_text", "rms_norm_eps": 1e-5, **text},
                {"model_type": "granite_docling_vision", **vision},
                image_token_id=3,
                **keys,
            ),
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
        },
        {
            **PREPROCESSING,
            "image_processor_type": "GraniteDoclingImageProcessor",
            "crop_to_patches": True,
            "fine_route": False,
            "min_patches": 1,
            "size": {"height": side, "width": side},
            **processor,
        },
        "GraniteDoclingProcessor",
        "<image>",
        ("<image>", "<fake_token_around_image>", "<global-img>", *tiles),
        {},
        {"image_seq_len": (side // vision["patch_size"] // vision["scale_factor"]) ** 2},
    )


DOCUMENT_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "glm_ocr_tiny": glm(
        "GlmOcrForConditionalGeneration",
        "glm_ocr",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {**CHUNKS, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0},
        },
        {"out_hidden_size": 48, "attention_bias": True},
        "Glm46V",
    ),
    "glm_ocr_odd_tiny": glm(
        "GlmOcrForConditionalGeneration",
        "glm_ocr",
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rope_parameters": {**CHUNKS, "mrope_section": [4, 4, 4]},
        },
        {"hidden_size": 36, "num_heads": 3, "out_hidden_size": 40, "intermediate_size": 44, "attention_bias": False},
        "Glm46V",
    ),
    "paddleocr_vl_tiny": _paddle(
        {"head_dim": 16, "rope_parameters": {**CHUNKS, "mrope_section": [2, 3, 3], "rope_theta": 5e5}}, {}, 2
    ),
    "paddleocr_vl_odd_tiny": _paddle(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "use_bias": True,
            "rope_parameters": {**CHUNKS, "mrope_section": [4, 4, 4]},
        },
        {"hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "image_size": 21, "patch_size": 5},
        3,
    ),
    "granite_docling_tiny": _docling(
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
        {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "out_hidden_size": 48,
            "scale_factor": 2,
            "deepstack_visual_indexes": [0, 2],
            "use_fine_route": True,
        },
        {"max_patches": 4},
        density_router_hidden_size=8,
    ),
    "granite_docling_odd_tiny": _docling(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "logits_scaling": 0.25,
            "residual_multiplier": 0.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 24,
            "patch_size": 4,
            "out_hidden_size": 40,
            "scale_factor": 3,
            "deepstack_visual_indexes": [1],
            "use_fine_route": False,
        },
        {
            "max_patches": 2,
            "dense_max_patches": 6,
            "dense_max_scale": 0.7,
            "dense_min_aspect": 1.2,
            "dense_max_aspect": 4.0,
        },
    ),
    "qianfan_ocr_tiny": _qianfan(
        {"head_dim": 16, "rope_theta": 1e4},
        {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2},
        24,
        6,
    ),
    "qianfan_ocr_odd_tiny": _qianfan(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rope_theta": 1e3,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "norm_type": "rms_norm",
            "use_mean_pooling": False,
            "use_qk_norm": True,
        },
        30,
        5,
    ),
    "lighton_ocr_tiny": _lighton(
        {"head_dim": 16, "rope_theta": 1e4, "tie_word_embeddings": False},
        {"patch_size": 8, "hidden_size": 24, "hidden_act": "silu"},
        2,
        56,
        tie_word_embeddings=True,
    ),
    "lighton_ocr_odd_tiny": _lighton(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rope_theta": 1e3,
        },
        {"patch_size": 5, "hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "hidden_act": "gelu"},
        3,
        50,
    ),
}
