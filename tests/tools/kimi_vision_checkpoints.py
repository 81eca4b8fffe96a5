"""Tiny checkpoints of tests/models/data/vision with MoonViT."""

from __future__ import annotations

from typing import Any

from vision_checkpoints import VisionCheckpoint, multimodal


def _kimi(text: dict[str, Any], vision: dict[str, Any], limits: tuple[int, int], **keys: Any) -> VisionCheckpoint:
    return VisionCheckpoint(
        multimodal(
            "Kimi_K25ForConditionalGeneration",
            "kimi_k25",
            {
                "model_type": "deepseek_v3",
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e4,
                "num_key_value_heads": text.get("num_attention_heads", 4),
                "moe_intermediate_size": 24,
                "n_routed_experts": 6,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.5,
                **text,
            },
            {
                "model_type": "kimi_k25_vision",
                "num_hidden_layers": 2,
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_attention_heads": 2,
                "merge_kernel_size": [2, 2],
                **vision,
            },
            image_token_id=3,
            video_token_id=4,
            projection_hidden_size=vision.get("hidden_size", 24),
            **keys,
        ),
        {
            "image_processor_type": "Kimi_K25ImageProcessor",
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.25],
            "merge_size": 2,
            "patch_size": vision["patch_size"],
            "max_patches": limits[0],
            "size": {"max_height": limits[1], "max_width": limits[1]},
        },
        "Kimi_K25Processor",
        "<|media_pad|>",
        ("<|media_pad|>", "<|kimi_k25_video_placeholder|>"),
        {},
        {"video_processor": "Kimi_K25VideoProcessor"},
    )


KIMI_VISION_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "kimi_k25_tiny": _kimi(
        {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
        {"patch_size": 8, "pos_emb_height": 5, "pos_emb_width": 5},
        (48, 9),
    ),
    "kimi_k25_odd_tiny": _kimi(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "q_lora_rank": 36,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 40,
            "rope_theta": 1e3,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_attention_heads": 3,
            "patch_size": 5,
            "pos_emb_height": 3,
            "pos_emb_width": 3,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 1e3},
        },
        (400, 12),
        projection_layer_norm_eps=1e-6,
    ),
}
