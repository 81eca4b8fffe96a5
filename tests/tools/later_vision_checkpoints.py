"""Further tiny checkpoints of tests/models/data/vision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vision_checkpoints import GEMMA4_ROPE, PREPROCESSING, VisionCheckpoint, gemma4, multimodal, qwen

INTERLEAVED: dict[str, Any] = {"rope_type": "default", "mrope_interleaved": True, "rope_theta": 1e4}
CHUNKS: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}


def pixtral(
    text: dict[str, Any],
    vision: dict[str, Any],
    merge: int,
    longest: int,
    names: tuple[str, str] = ("Mistral3ForConditionalGeneration", "mistral3"),
    **keys: Any,
) -> VisionCheckpoint:
    """Return a checkpoint with Pixtral's tower."""
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
            **PREPROCESSING,
            "image_processor_type": "PixtralImageProcessorFast",
            "patch_size": {"height": vision["patch_size"], "width": vision["patch_size"]},
            "size": {"longest_edge": longest},
        },
        "PixtralProcessor",
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {},
        {"patch_size": vision["patch_size"], "spatial_merge_size": merge},
    )


def _llava(text: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any], **keys: Any) -> VisionCheckpoint:
    is_clip = vision["model_type"] == "clip_vision_model"
    strategy = "default" if is_clip else "full"
    return VisionCheckpoint(
        multimodal(
            "LlavaForConditionalGeneration",
            "llava",
            text,
            vision,
            image_token_index=3,
            vision_feature_select_strategy=strategy,
            **keys,
        ),
        {
            **PREPROCESSING,
            **processor,
        },
        "LlavaProcessor",
        "<image>",
        ("<image>",),
        {},
        {
            "patch_size": vision["patch_size"],
            "vision_feature_select_strategy": strategy,
            "num_additional_image_tokens": int(is_clip),
        },
    )


def internvl(text: dict[str, Any], vision: dict[str, Any], tile: int, patch: int) -> VisionCheckpoint:
    """Return a checkpoint of InternVL's, whose images are tiles."""
    named = {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    }
    tokens = (tile // patch) ** 2 // 4
    return VisionCheckpoint(
        multimodal(
            "InternVLForConditionalGeneration",
            "internvl",
            text,
            {"model_type": "internvl_vision", "image_size": [tile, tile], "patch_size": [patch, patch], **vision},
            image_token_id=3,
            downsample_ratio=0.5,
            image_seq_length=tokens,
        ),
        {
            **PREPROCESSING,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "crop_to_patches": False,
            "max_patches": 4,
            "min_patches": 1,
            "size": {"height": tile, "width": tile},
        },
        "InternVLProcessor",
        "<IMG_CONTEXT>",
        tuple(named.values()),
        named,
        {"video_processor": "InternVLVideoProcessor", "image_seq_length": tokens},
    )


def _lfm2(text: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any], **keys: Any) -> VisionCheckpoint:
    tiles = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4))
    return VisionCheckpoint(
        multimodal(
            "Lfm2VlForConditionalGeneration",
            "lfm2_vl",
            {"model_type": "lfm2", "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False, **text},
            {
                "model_type": "siglip2_vision_model",
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                **vision,
            },
            image_token_id=3,
            downsample_factor=processor["downsample_factor"],
            **keys,
        ),
        {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "do_image_splitting": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": False,
            "encoder_patch_size": vision["patch_size"],
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.25],
            "rescale_factor": 1 / 255,
            **processor,
        },
        "Lfm2VlProcessor",
        "<image>",
        ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *tiles),
        {},
        {},
    )


def _lfm3(text: dict[str, Any], vision: dict[str, Any], **keys: Any) -> VisionCheckpoint:
    tiny = qwen(
        "Lfm3VlForConditionalGeneration",
        "lfm3_vl",
        {"model_type": "lfm3", "norm_eps": 1e-5, "sliding_window": 8, "tie_word_embeddings": True, **text},
        {},
        "Lfm3VlProcessor",
    )
    own = {"model_type": "lfm3_vl_vision", "patch_size": 8, "spatial_merge_size": 2, **vision}
    return replace(tiny, config={**tiny.config, "vision_config": own, "tie_word_embeddings": True, **keys})


def _cohere(text: dict[str, Any], vision: dict[str, Any], merge: int, most: int, **keys: Any) -> VisionCheckpoint:
    tokens = {
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    side = vision["image_size"]
    return VisionCheckpoint(
        {
            **multimodal(
                "Cohere2VisionForConditionalGeneration",
                "cohere2_vision",
                {
                    "model_type": "cohere2",
                    "logit_scale": 1.0,  # transformers' class of the whole model leaves it out
                    "layer_norm_eps": 1e-5,
                    "sliding_window": 24,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                    "tie_word_embeddings": True,
                    **text,
                },
                {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2, **vision},
                image_token_id=3,
                downsample_factor=merge,
                **keys,
            ),
            "tie_word_embeddings": True,
        },
        {
            **PREPROCESSING,
            "image_processor_type": "Cohere2VisionImageProcessorFast",
            "crop_to_patches": True,
            "max_patches": most,
            "min_patches": 1,
            "patch_size": side // vision["patch_size"] // merge,
            "size": {"height": side, "width": side},
        },
        "Cohere2VisionProcessor",
        "<|IMG_PATCH|>",
        tuple(tokens.values()),
        tokens,
        {},
    )


def _aya(text: dict[str, Any], vision: dict[str, Any], merge: int, most: int, **keys: Any) -> VisionCheckpoint:
    tiny, side = _cohere(text, vision, merge, most), vision["image_size"]
    tokens = (
        "<|IMG_PATCH|>",
        "<image>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "TILE_GLOBAL",
        *(f"TILE_{i}" for i in range(1, 7)),
    )
    config = {
        key: value for key, value in tiny.config.items() if key not in ("image_token_id", "alignment_intermediate_size")
    }
    if text.get("model_type") == "cohere":
        absent = ("sliding_window", "layer_types")
        config["text_config"] = {key: value for key, value in config["text_config"].items() if key not in absent}
    named = {"architectures": ["AyaVisionForConditionalGeneration"], "model_type": "aya_vision", "image_token_index": 3}
    processor = {key: value for key, value in tiny.processor.items() if key != "patch_size"}
    return replace(
        tiny,
        config={**config, **named, **keys},
        processor={**processor, "image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False},
        processor_class="AyaVisionProcessor",
        placeholder="<image>",
        markers=tokens,
        named_tokens={},
        processor_keys={"patch_size": vision["patch_size"], "img_size": side, "downsample_factor": merge},
    )


def _llama4(text: dict[str, Any], vision: dict[str, Any], tile: int, most: int) -> VisionCheckpoint:
    patch, width = vision["patch_size"], vision["projector_output_dim"]
    markers = (
        "<|patch|>",
        "<|image|>",
        "<|image_start|>",
        "<|image_end|>",
        "<|tile_x_separator|>",
        "<|tile_y_separator|>",
    )
    return VisionCheckpoint(
        multimodal(
            "Llama4ForConditionalGeneration",
            "llama4",
            {
                "model_type": "llama4_text",
                "head_dim": 16,
                "intermediate_size": 24,
                "intermediate_size_mlp": 56,
                "interleave_moe_layer_step": 2,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "attention_chunk_size": 32,
                "no_rope_layer_interval": 3,
                "rope_theta": 1e4,
                "rms_norm_eps": 1e-5,
                **text,
            },
            {
                "model_type": "llama4_vision_model",
                "num_hidden_layers": 2,
                "image_size": tile,
                "intermediate_size": 4 * vision["hidden_size"],
                "projector_input_dim": width,
                "vision_output_dim": width,
                "pixel_shuffle_ratio": 0.5,
                **vision,
            },
            image_token_index=3,
            boi_token_index=5,
            eoi_token_index=6,
        ),
        {
            **PREPROCESSING,
            "image_processor_type": "Llama4ImageProcessorFast",
            "max_patches": most,
            "resample": 2,
            "size": {"height": tile, "width": tile},
        },
        "Llama4Processor",
        "<|image|>",
        markers,
        {},
        {"patch_size": patch, "pixel_shuffle_ratio": 0.5},
    )


def _gemma4_unified(text: dict[str, Any], vision: dict[str, Any]) -> VisionCheckpoint:
    tiny = gemma4(
        {
            "model_type": "gemma4_unified_text",
            "attention_k_eq_v": True,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            **text,
        },
        {"model_type": "gemma4_unified_vision", "output_proj_dims": vision["mm_embed_dim"], **vision},
        architecture="Gemma4UnifiedForConditionalGeneration",
        model_type="gemma4_unified",
        audio_config={"model_type": "gemma4_unified_audio", "audio_embed_dim": 24},
    )
    del tiny.config["vision_config"]["num_hidden_layers"]
    return replace(
        tiny,
        processor={**tiny.processor, "image_processor_type": "Gemma4UnifiedImageProcessor"},
        processor_class="Gemma4UnifiedProcessor",
        processor_keys={
            "feature_extractor": "Gemma4UnifiedAudioFeatureExtractor",
            "video_processor": "Gemma4UnifiedVideoProcessor",
        },
    )


def glm(
    architecture: str, model_type: str, text: dict[str, Any], vision: dict[str, Any], processor: str = "Glm4v"
) -> VisionCheckpoint:
    """Return a checkpoint of GLM's, whose images have any size. processor: start of the names of its processors."""
    return VisionCheckpoint(
        multimodal(
            architecture,
            model_type,
            {"model_type": f"{model_type}_text", "rms_norm_eps": 1e-5, **text},
            {
                "model_type": f"{model_type}_vision",
                "depth": 2,
                "hidden_size": 24,
                "num_heads": 2,
                "image_size": 40,
                "patch_size": 8,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "intermediate_size": 56,
                "rms_norm_eps": 1e-5,
                **vision,
            },
            image_token_id=3,
            video_token_id=4,
            image_start_token_id=5,
            image_end_token_id=6,
            video_start_token_id=7,
            video_end_token_id=8,
        ),
        {
            "image_processor_type": f"{processor}ImageProcessor",
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.25],
            "merge_size": 2,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 2048, "longest_edge": 6144},
        },
        f"{processor}Processor",
        "<|image|>",
        (
            "<|image|>",
            "<|video|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        ),
        {},
        {"video_processor": f"{processor}VideoProcessor"},
    )


def _omni(text: dict[str, Any], vision: dict[str, Any], stem: str = "Qwen3OmniMoe") -> VisionCheckpoint:
    """Return a checkpoint of Qwen3-Omni's or Qwen2.5-Omni's, whose config has that of the part that makes texts in a table."""
    name = {"Qwen3OmniMoe": "qwen3_omni_moe", "Qwen2_5Omni": "qwen2_5_omni"}[stem]
    names = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
    made = qwen(f"{stem}ForConditionalGeneration", name, text, vision, f"{stem}Processor")
    thinker = {key: value for key, value in made.config.items() if key != "architectures"}
    thinker |= {
        "model_type": f"{name}_thinker",
        "vision_config": {**thinker["vision_config"], "model_type": f"{name}_vision_encoder"},
        "audio_config": {
            "model_type": f"{name}_audio_encoder",
            "d_model": 8,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 8,
            "downsample_hidden_size": 4,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "output_dim": text.get("hidden_size", 48),
        },
        "audio_token_id": 7,
        "audio_start_token_id": 8,
        "audio_end_token_id": 9,
    }
    tokens = ("image_token", "video_token", "vision_bos_token", "vision_eos_token")
    tokens += ("audio_token", "audio_bos_token", "audio_eos_token")
    return replace(
        made,
        config={"architectures": made.config["architectures"], "model_type": name, "thinker_config": thinker},
        markers=(*made.markers, *names),
        named_tokens=dict(zip(tokens, (*made.markers, *names), strict=True)),
        processor_keys={"video_processor": "Qwen2VLVideoProcessor", "feature_extractor": "WhisperFeatureExtractor"},
    )


LATER_VISION_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "qwen3_omni_moe_tiny": _omni(
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "rope_parameters": {**INTERLEAVED, "mrope_section": [6, 5, 5]},
        },
        {"deepstack_visual_indexes": [2, 0]},
    ),
    "qwen3_omni_moe_odd_tiny": _omni(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "rope_parameters": {**INTERLEAVED, "mrope_section": [4, 4, 4]},
        },
        {
            "depth": 2,
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_heads": 3,
            "num_position_embeddings": 25,
            "out_hidden_size": 40,
            "deepstack_visual_indexes": [1, 0],
        },
    ),
    "qwen2_5_omni_tiny": _omni(
        {"rope_parameters": {**CHUNKS, "mrope_section": [1, 3, 2]}},
        {"window_size": 40, "fullatt_block_indexes": [1]},
        "Qwen2_5Omni",
    ),
    "qwen2_5_omni_odd_tiny": _omni(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "rope_parameters": {**CHUNKS, "mrope_section": [2, 1, 1]},
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
        "Qwen2_5Omni",
    ),
    "qwen2_vl_tiny": qwen(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {"rope_parameters": CHUNKS},
        {"embed_dim": 24, "hidden_size": 48, "mlp_ratio": 2},
        "Qwen2VLProcessor",
        "Qwen2VLVideoProcessor",
    ),
    "qwen2_5_vl_tiny": qwen(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {"rope_parameters": {**CHUNKS, "mrope_section": [1, 3, 2]}},
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
            "rope_parameters": {**CHUNKS, "mrope_section": [2, 1, 1]},
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
    "exaone4_5_tiny": qwen(
        "Exaone4_5_ForConditionalGeneration",
        "exaone4_5",
        {"model_type": "exaone4", "rope_theta": 1e4, "sliding_window": 8, "sliding_window_pattern": 2},
        {"window_size": 40, "fullatt_block_indexes": [1], "num_heads": 2, "num_key_value_heads": 1},
        "Exaone4_5_Processor",
        "Qwen2VLVideoProcessor",
    ),
    "exaone4_5_odd_tiny": qwen(
        "Exaone4_5_ForConditionalGeneration",
        "exaone4_5",
        {
            "model_type": "exaone4",
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "rope_theta": 1e3,
            "sliding_window": 40,
            "sliding_window_pattern": 3,
        },
        {
            "depth": 2,
            "hidden_size": 72,
            "intermediate_size": 44,
            "num_heads": 6,
            "num_key_value_heads": 2,
            "out_hidden_size": 40,
            "window_size": 64,
            "fullatt_block_indexes": [1, 7],
        },
        "Exaone4_5_Processor",
        "Qwen2VLVideoProcessor",
    ),
    "mistral3_vision_tiny": pixtral(
        {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": None, "head_dim": 16},
        {"patch_size": 8, "hidden_act": "silu"},
        2,
        56,
        projector_hidden_act="gelu",
        multimodal_projector_bias=False,
    ),
    "pixtral_tiny": pixtral(
        {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": None, "head_dim": 16},
        {"patch_size": 12, "hidden_act": "silu", "rope_theta": 1e3},
        1,
        56,
        ("LlavaForConditionalGeneration", "llava"),
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
    ),
    "pixtral_odd_tiny": pixtral(
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
    "mistral3_vision_odd_tiny": pixtral(
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
    "llava_tiny": _llava(
        {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4},
        {
            "model_type": "clip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        },
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_center_crop": True,
            "size": {"shortest_edge": 33},
            "crop_size": {"height": 28, "width": 28},
        },
        vision_feature_layer=-2,
    ),
    "llava_siglip_odd_tiny": _llava(
        {
            "model_type": "qwen2",
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e3,
        },
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 25,
            "patch_size": 5,
            "vision_use_head": False,
        },
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 25, "width": 25}},
        vision_feature_layer=-1,
        projector_hidden_act="silu",
        multimodal_projector_bias=False,
    ),
    "internvl_tiny": internvl(
        {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "attention_bias": True,
            "use_mean_pooling": True,
        },
        24,
        6,
    ),
    "internvl_odd_tiny": internvl(
        {
            "model_type": "qwen3",
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e3,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "attention_bias": False,
            "use_qk_norm": True,
            "norm_type": "rms_norm",
            "use_mean_pooling": False,
        },
        30,
        5,
    ),
    "glm4v_tiny": glm(
        "Glm4vForConditionalGeneration",
        "glm4v",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {**CHUNKS, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5},
        },
        {"out_hidden_size": 48},
    ),
    "glm4v_moe_odd_tiny": glm(
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**CHUNKS, "mrope_section": [2, 2, 2], "partial_rotary_factor": 0.5},
        },
        {"hidden_size": 36, "num_heads": 3, "out_hidden_size": 40, "image_size": 24, "attention_bias": True},
    ),
    "lfm2_vl_tiny": _lfm2(
        {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
        {"patch_size": 8, "num_patches": 36},
        {
            "downsample_factor": 2,
            "max_image_tokens": 6,
            "max_pixels_tolerance": 2.0,
            "max_tiles": 4,
            "min_image_tokens": 2,
            "min_tiles": 2,
            "resample": 2,
            "tile_size": 32,
            "use_thumbnail": True,
        },
        projector_hidden_size=56,
        projector_use_layernorm=True,
    ),
    "lfm2_vl_odd_tiny": _lfm2(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
        {
            "patch_size": 5,
            "num_patches": 9,
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_attention_heads": 3,
            "hidden_act": "gelu",
        },
        {
            "downsample_factor": 3,
            "max_image_tokens": 6,
            "max_pixels_tolerance": 1.5,
            "max_tiles": 6,
            "min_image_tokens": 3,
            "min_tiles": 2,
            "resample": 3,
            "tile_size": 30,
            "use_thumbnail": False,
        },
        projector_hidden_size=72,
        projector_use_layernorm=False,
        projector_bias=False,
        projector_hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "gemma4_unified_vision_tiny": _gemma4_unified(
        {
            "head_dim": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "rope_parameters": GEMMA4_ROPE,
        },
        {"mm_embed_dim": 40, "mm_posemb_size": 72, "patch_size": 4, "pooling_kernel_size": 2},
    ),
    "gemma4_unified_vision_odd_tiny": _gemma4_unified(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 40,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 8,
            "final_logit_softcapping": 8.0,
            "rope_parameters": GEMMA4_ROPE,
            "use_bidirectional_attention": None,
        },
        {"mm_embed_dim": 28, "mm_posemb_size": 70, "patch_size": 5, "pooling_kernel_size": 1, "rms_norm_eps": 1e-5},
    ),
    "llama4_vision_tiny": _llama4(
        {},
        {"hidden_size": 32, "num_attention_heads": 2, "patch_size": 7, "projector_output_dim": 40},
        28,
        4,
    ),
    "llama4_vision_odd_tiny": _llama4(
        {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "num_local_experts": 3,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": False,
        },
        {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "patch_size": 5,
            "projector_output_dim": 28,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        30,
        6,
    ),
    "lfm3_vl_tiny": _lfm3(
        {"head_dim": 16, "layer_types": ["conv", "full_attention", "sliding_attention"], "conv_L_cache": 3},
        {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "conv", "full_attention"],
        },
        projector_hidden_size=56,
    ),
    "lfm3_vl_odd_tiny": _lfm3(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_L_cache": 4,
            "use_sandwich_norm": False,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "conv_kernel_size": 5,
            "layer_types": ["full_attention", "conv"],
            "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        },
        projector_hidden_size=72,
        projector_bias=False,
        projector_hidden_act="silu",
    ),
    "cohere2_vision_tiny": _cohere(
        {"head_dim": 16},
        {"hidden_size": 24, "intermediate_size": 40, "image_size": 32, "patch_size": 8},
        2,
        4,
        alignment_intermediate_size=80,
    ),
    "cohere2_vision_odd_tiny": _cohere(
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 8,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_attention_heads": 3,
            "image_size": 30,
            "patch_size": 5,
            "hidden_act": "gelu",
            "vision_use_head": False,
        },
        3,
        6,
        alignment_intermediate_size=44,
    ),
    "aya_vision_tiny": _aya(
        {"head_dim": 16},
        {"hidden_size": 24, "intermediate_size": 40, "image_size": 32, "patch_size": 8},
        2,
        4,
    ),
    "aya_vision_odd_tiny": _aya(
        {
            "model_type": "cohere",
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
        },
        {
            "hidden_size": 36,
            "intermediate_size": 44,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": 30,
            "patch_size": 5,
            "hidden_act": "gelu",
        },
        3,
        6,
        vision_feature_layer=-2,
        alignment_intermediate_size=44,
        adapter_layer_norm_eps=1e-3,
    ),
}
