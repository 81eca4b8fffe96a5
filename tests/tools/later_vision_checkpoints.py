"""Further tiny checkpoints of tests/models/data/vision."""

from __future__ import annotations

from typing import Any

from vision_checkpoints import VisionCheckpoint, multimodal, qwen

_CHUNKS: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}


def _pixtral(
    text: dict[str, Any],
    vision: dict[str, Any],
    merge: int,
    longest: int,
    names: tuple[str, str] = ("Mistral3ForConditionalGeneration", "mistral3"),
    **keys: Any,
) -> VisionCheckpoint:
    vision = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, **vision}
    return VisionCheckpoint(
        multimodal(
            *names,
            {"rms_norm_eps": 1e-5, **text},
            {"model_type": "pixtral", "head_dim": vision["hidden_size"] // vision["num_attention_heads"], **vision},
            image_token_index=3,
            **({"spatial_merge_size": merge} if merge > 1 else {}),
            vision_feature_layer=-1,
            **keys,
        ),
        {
            "image_processor_type": "PixtralImageProcessorFast",
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.25],
            "patch_size": {"height": vision["patch_size"], "width": vision["patch_size"]},
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": longest},
        },
        "PixtralProcessor",
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {},
        {"patch_size": vision["patch_size"], "spatial_merge_size": merge},
    )


LATER_VISION_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "qwen2_vl_tiny": qwen(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {"rope_parameters": _CHUNKS},
        {"embed_dim": 24, "hidden_size": 48, "mlp_ratio": 2},
        "Qwen2VLProcessor",
        "Qwen2VLVideoProcessor",
    ),
    "qwen2_5_vl_tiny": qwen(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {"rope_parameters": {**_CHUNKS, "mrope_section": [1, 3, 2]}},
        {"window_size": 40, "fullatt_block_indexes": [1]},
        "Qwen2_5_VLProcessor",
        "Qwen2VLVideoProcessor",
    ),
    "qwen2_5_vl_odd_tiny": qwen(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "rope_parameters": {**_CHUNKS, "mrope_section": [2, 1, 1]},
        },
        {
            "depth": 2,
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_heads": 3,
            "out_hidden_size": 40,
            "window_size": 64,
            "fullatt_block_indexes": [1, 7],
        },
        "Qwen2_5_VLProcessor",
        "Qwen2VLVideoProcessor",
    ),
    "mistral3_vision_tiny": _pixtral(
        {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": None, "head_dim": 16},
        {"patch_size": 8, "hidden_act": "silu"},
        2,
        56,
        projector_hidden_act="gelu",
        multimodal_projector_bias=False,
    ),
    "pixtral_tiny": _pixtral(
        {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": None, "head_dim": 16},
        {"patch_size": 12, "hidden_act": "silu", "rope_theta": 1e3},
        1,
        56,
        ("LlavaForConditionalGeneration", "llava"),
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
    ),
    "pixtral_odd_tiny": _pixtral(
        {
            "model_type": "mistral",
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rope_theta": 1e3,
            "sliding_window": 40,
        },
        {"patch_size": 5, "hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "hidden_act": "gelu"},
        1,
        38,
        ("LlavaForConditionalGeneration", "llava"),
        vision_feature_select_strategy="full",
        projector_hidden_act="silu",
        multimodal_projector_bias=False,
    ),
    "mistral3_vision_odd_tiny": _pixtral(
        {
            "model_type": "ministral3",
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        {"patch_size": 5, "hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 3, "hidden_act": "gelu"},
        3,
        50,
        projector_hidden_act="silu",
        multimodal_projector_bias=True,
    ),
}
