"""Tiny checkpoints of tests/models/data/vision of LLaVA's successors."""

from __future__ import annotations

from typing import Any

from vision_checkpoints import PREPROCESSING, VisionCheckpoint, multimodal

_TEXT: dict[str, Any] = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4}
_ODD_TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e3,
}
_CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 25,
    "patch_size": 6,
    "vision_use_head": False,
}
_NAMES = {
    "llava_next": ("LlavaNextForConditionalGeneration", "LlavaNextImageProcessor", "LlavaNextProcessor"),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        "LlavaOnevisionImageProcessor",
        "LlavaOnevisionProcessor",
    ),
    "vipllava": ("VipLlavaForConditionalGeneration", "CLIPImageProcessor", "LlavaProcessor"),
}


def _llava(kind: str, text: dict[str, Any], vision: dict[str, Any], **keys: Any) -> VisionCheckpoint:
    architecture, processor, processor_class = _NAMES[kind]
    side, patch, is_clip = vision["image_size"], vision["patch_size"], vision["model_type"] == "clip_vision_model"
    strategy = "default" if is_clip else "full"
    is_one_vision = kind == "llava_onevision"
    grids = {"image_grid_pinpoints": keys["image_grid_pinpoints"]} if "image_grid_pinpoints" in keys else {}
    square = {"height": side, "width": side}
    sizes = {"size": square} if is_one_vision else {"size": {"shortest_edge": side}, "crop_size": square}
    if is_one_vision:
        aspect = {"vision_aspect_ratio": keys["vision_aspect_ratio"], "video_processor": "LlavaOnevisionVideoProcessor"}
        counts = {"num_image_tokens": (side // patch) ** 2, **aspect}
    else:
        counts = {"patch_size": patch, "num_additional_image_tokens": int(is_clip)}
    return VisionCheckpoint(
        multimodal(
            architecture,
            kind,
            text,
            vision,
            image_token_index=3,
            **({"video_token_index": 4} if is_one_vision else {}),
            **({} if kind == "vipllava" else {"vision_feature_select_strategy": strategy}),
            **keys,
        ),
        {**PREPROCESSING, "image_processor_type": processor, **sizes, **grids},
        processor_class,
        "<image>",
        ("<image>", "<video>") if is_one_vision else ("<image>",),
        {},
        {"vision_feature_select_strategy": strategy, **counts},
    )


TILED_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "llava_next_tiny": _llava(
        "llava_next",
        _TEXT,
        _CLIP,
        vision_feature_layer=-2,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    ),
    "llava_next_odd_tiny": _llava(
        "llava_next",
        {**_ODD_TEXT, "model_type": "mistral", "head_dim": 24, "sliding_window": None},
        _SIGLIP,
        vision_feature_layer=-1,
        image_grid_pinpoints=[[25, 25], [25, 50], [50, 25]],
        projector_hidden_act="silu",
        multimodal_projector_bias=False,
    ),
    "llava_onevision_tiny": _llava(
        "llava_onevision",
        {**_ODD_TEXT, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
        _SIGLIP,
        image_grid_pinpoints=[[25 * rows, 25 * columns] for rows in range(1, 4) for columns in range(1, 4)],
        vision_aspect_ratio="anyres_max_2",
    ),
    "llava_onevision_odd_tiny": _llava(
        "llava_onevision",
        _ODD_TEXT,
        {**_SIGLIP, "image_size": 30, "patch_size": 5},
        image_grid_pinpoints=[[30, 30], [60, 90]],
        vision_aspect_ratio="anyres_max_1",
        vision_feature_layer=[-1, 1],
        projector_hidden_act="silu",
        multimodal_projector_bias=False,
    ),
    "vipllava_tiny": _llava("vipllava", _TEXT, _CLIP, vision_feature_layer=[-2, -3, 1]),
    "vipllava_odd_tiny": _llava(
        "vipllava",
        {**_ODD_TEXT, "model_type": "mistral", "head_dim": 24, "sliding_window": None},
        {**_CLIP, "hidden_size": 36, "num_attention_heads": 3, "image_size": 25, "patch_size": 5},
        vision_feature_layer=[3, 1],
        projector_hidden_act="silu",
        projector_layernorm_eps=1e-3,
    ),
}


def _ovis(
    text: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any], *, is_tied: bool
) -> VisionCheckpoint:
    side, patch, stride = vision["image_size"], vision["patch_size"], vision.get("hidden_stride", 1)
    marks = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    config = multimodal(
        "Ovis2ForConditionalGeneration",
        "ovis2",
        {**text, "model_type": text.get("model_type", "qwen2"), "tie_word_embeddings": is_tied},
        {"model_type": "ovis2_vision", "num_visual_indicator_tokens": 5, **vision},
        image_token_id=4,
        visual_indicator_token_ids=[5, 6, 7, 8, 9],
    )
    own = config["text_config"]
    return VisionCheckpoint(
        {**config, "vocab_size": own["vocab_size"], "hidden_size": own["hidden_size"], "tie_word_embeddings": is_tied},
        {
            **PREPROCESSING,
            "image_processor_type": "Ovis2ImageProcessor",
            "size": {"height": side, "width": side},
            **processor,
        },
        "Ovis2Processor",
        "<image>",
        ("<image>", "<IMG_ATOM>", *marks),
        {},
        {"image_seq_length": (side // patch // stride) ** 2},
    )


TILED_CHECKPOINTS |= {
    "ovis2_tiny": _ovis(
        {**_ODD_TEXT, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
        {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "hidden_stride": 2,
            "vocab_size": 37,
        },
        {"crop_to_patches": True, "max_patches": 4},
        is_tied=True,
    ),
    "ovis2_odd_tiny": _ovis(
        _ODD_TEXT,
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 20,
            "patch_size": 5,
            "vocab_size": 29,
            "qkv_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
            "tokenize_function": "st_argmax",
        },
        {"crop_to_patches": True, "max_patches": 3, "use_covering_area_grid": False},
        is_tied=False,
    ),
}
