"""Tiny checkpoints of further models that read images; see vision_checkpoints.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from later_vision_checkpoints import INTERLEAVED, pixtral
from mixture_checkpoints import LATENT, YARN
from vision_checkpoints import VisionCheckpoint, multimodal, qwen

_HYPERCLOVAX: dict[str, Any] = {
    "model_type": "hyperclovax",
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.125,
    "logits_scaling": 1.3,
    "rope_theta": 1e4,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
}
_ODD_TEXT: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}
_ODD_TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 36, "intermediate_size": 44, "num_heads": 3}


def _hyperclovax(text: dict[str, Any], vision: dict[str, Any]) -> VisionCheckpoint:
    return qwen(
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "hyperclovax_vision_v2",
        {**_HYPERCLOVAX, **text},
        {"model_type": "qwen2_5_vl_vision", "window_size": 40, "fullatt_block_indexes": [1], **vision},
        "HyperCLOVAXVisionV2Processor",
        "Qwen2VLVideoProcessor",
    )


def _video_llama3(text: dict[str, Any], vision: dict[str, Any], merge: int) -> VisionCheckpoint:
    made = qwen(
        "VideoLlama3ForConditionalGeneration",
        "video_llama_3",
        {"model_type": "qwen2", "rope_theta": 1e4, **text},
        {},
        "VideoLlama3Processor",
        "VideoLlama3VideoProcessor",
    )
    processor = {"image_processor_type": "VideoLlama3ImageProcessor", "merge_size": merge, "temporal_patch_size": 1}
    return replace(
        made,
        config=made.config | {"vision_config": {**_SIGLIP, "model_type": "video_llama_3_vision", **vision}},
        processor=made.processor | processor,
    )


def _cosmos3(text: dict[str, Any], vision: dict[str, Any]) -> VisionCheckpoint:
    return qwen(
        "Cosmos3OmniForConditionalGeneration",
        "cosmos3_omni",
        {"model_type": "qwen3_vl_text", **text},
        {"model_type": "qwen3_vl_vision", **vision},
    )


def _muse(text: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any], width: int) -> VisionCheckpoint:
    vision = {**_SIGLIP, "num_hidden_layers": 3, "merge_size": 2, "patch_temporal": 2, **vision}
    thetas = [1e4, 0] if text else [1e4, 1e4, 0]
    return VisionCheckpoint(
        multimodal(
            "MuseGlimmerForConditionalGeneration",
            "muse_glimmer",
            {
                "model_type": "muse_glimmer_text",
                "head_dim": 16,
                "num_hidden_layers": len(thetas),
                "sliding_window": 8,
                "layer_types": ["sliding_attention"] * (len(thetas) - 1) + ["full_attention"],
                "layer_rope_theta": thetas,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "final_logit_softcapping": 8.0,
                "output_multiplier": 0.9,
                "qk_scale_factor": 1.3,
                **text,
            },
            vision,
            image_token_id=3,
            out_hidden_size=4 * vision["hidden_size"],
            projector_hidden_size=width,
        ),
        {
            "image_processor_type": "MuseGlimmerImageProcessor",
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.25],
            "merge_size": 2,
            "patch_size": vision["patch_size"],
            "temporal_patch_size": vision["patch_temporal"],
            **processor,
        },
        "MuseGlimmerProcessor",
        "<|patch|>",
        ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>"),
        {},
        {"video_processor": "MuseGlimmerVideoProcessor"},
    )


def _compass(text: dict[str, Any], vision: dict[str, Any]) -> VisionCheckpoint:
    made = qwen(
        "CohereCompassForConditionalGeneration",
        "cohere_compass",
        {"logit_scale": 0.5, "layer_norm_eps": 1e-5, "sliding_window": 8, **text},
        vision,
        "CohereCompassProcessor",
        "CohereCompassVideoProcessor",
    )
    markers = ("<|IMAGE_PAD|>", "<|VIDEO_PAD|>", "<|VISION_START|>", "<|VISION_END|>")
    return replace(
        made,
        processor=made.processor | {"image_processor_type": "CohereCompassImageProcessor"},
        placeholder="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        markers=markers,
    )


def _edge(text: dict[str, Any], vision: dict[str, Any], width: int) -> VisionCheckpoint:
    made = qwen(
        "Cosmos3EdgeForConditionalGeneration",
        "cosmos3_edge",
        text,
        {},
        "Cosmos3EdgeProcessor",
        "Cosmos3EdgeVideoProcessor",
    )
    vision = {**_SIGLIP, "model_type": "cosmos3_edge_vision", "num_patches": 36, **vision}
    processor = {"image_processor_type": "Cosmos3EdgeImageProcessor", "temporal_patch_size": 1}
    return replace(
        made,
        config=made.config | {"vision_config": vision, "projector_hidden_size": width},
        processor=made.processor | processor,
    )


FURTHER_VISION_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "mistral4_vision_tiny": pixtral(
        {"model_type": "mistral4", **LATENT, "n_group": 3, "topk_group": 2, "rope_parameters": YARN}
        | {"intermediate_size": 56, "first_k_dense_replace": 1},
        {"patch_size": 8, "hidden_act": "silu"},
        2,
        56,
    ),
    "mistral4_vision_odd_tiny": pixtral(
        {"model_type": "mistral4", **LATENT, "n_routed_experts": 5, "rope_parameters": YARN}
        | {"hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3, "n_group": 1, "topk_group": 1}
        | {"q_lora_rank": None, "qk_nope_head_dim": 10, "first_k_dense_replace": 0},
        {"hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "patch_size": 10},
        2,
        60,
    ),
    "hyperclovax_vision_v2_tiny": _hyperclovax({}, {"out_hidden_size": 32}),
    "hyperclovax_vision_v2_odd_tiny": _hyperclovax(
        {**_ODD_TEXT, "use_post_norm": False},
        {**_ODD_TOWER, "out_hidden_size": 20, "window_size": 64, "fullatt_block_indexes": [1, 7]},
    ),
    "cosmos3_omni_tiny": _cosmos3(
        {"head_dim": 32, "rope_parameters": {**INTERLEAVED, "mrope_section": [6, 5, 5]}},
        {"deepstack_visual_indexes": [2, 0]},
    ),
    "cosmos3_omni_odd_tiny": _cosmos3(
        {**_ODD_TEXT, "head_dim": 24, "rope_parameters": {**INTERLEAVED, "mrope_section": [4, 4, 4]}},
        {**_ODD_TOWER, "num_position_embeddings": 25, "out_hidden_size": 40, "deepstack_visual_indexes": [1]},
    ),
    "cohere_compass_tiny": _compass(
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
            },
        },
        {"deepstack_visual_indexes": [2, 0]},
    ),
    "cohere_compass_odd_tiny": _compass(
        {
            **_ODD_TEXT,
            "logit_scale": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [2, 1, 1]}
            },
        },
        {**_ODD_TOWER, "num_position_embeddings": 25, "out_hidden_size": 40, "deepstack_visual_indexes": [1]},
    ),
    "cosmos3_edge_tiny": _edge(
        {"head_dim": 32, "rope_parameters": {**INTERLEAVED, "mrope_section": [6, 5, 5]}}, {}, 56
    ),
    "cosmos3_edge_odd_tiny": _edge(
        {
            **_ODD_TEXT,
            "head_dim": 24,
            "rope_parameters": {**INTERLEAVED, "mrope_section": [4, 4, 4]},
            "attention_bias": True,
            "mlp_bias": True,
        },
        {"hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "num_patches": 9},
        100,
    ),
    "muse_glimmer_vision_tiny": _muse(
        {}, {"pos_emb_height": 4, "pos_emb_width": 4, "layer_types": None}, {"max_image_tokens": 12}, 20
    ),
    "muse_glimmer_vision_odd_tiny": _muse(
        _ODD_TEXT | {"num_key_value_heads": 5},
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_attention_heads": 3,
            "patch_size": 6,
            "pos_emb_height": 6,
            "pos_emb_width": 6,
            "patch_temporal": 3,
            "layer_types": ["window_attention", "full_attention", "window_attention"],
        },
        {"max_image_tokens": 20, "resample": 3},
        32,
    ),
    "video_llama3_tiny": _video_llama3({}, {}, 1),
    "video_llama3_odd_tiny": _video_llama3(
        _ODD_TEXT, {"hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3}, 2
    ),
}
