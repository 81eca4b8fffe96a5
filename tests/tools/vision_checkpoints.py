"""The tiny checkpoints of tests/models/data/vision: configs of a tower, a decoder, a preprocessing and a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 352
BOS, EOS = 0, 2
SIZES = ((80, 50), (30, 45), (20, 22))
"""Widths and heights of the pictures of a golden."""


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """One checkpoint: its config, its preprocessing, and the control tokens of its images."""

    config: dict[str, Any]
    processor: dict[str, Any]
    processor_class: str
    placeholder: str
    """Text of an image in the prompts of the golden."""
    markers: tuple[str, ...]
    named_tokens: dict[str, str]
    """Control tokens under their names in `tokenizer_config.json`."""
    processor_keys: dict[str, Any]
    """Further arguments of the processor's class."""


_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_SIGLIP: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
PREPROCESSING: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.25],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
"""Keys that most preprocessings have."""
_FIRST_MARKER = 3
"""Id of the first control token of images, after three others."""


def multimodal(architecture: str, model_type: str, text: dict[str, Any], vision: dict[str, Any], **keys: Any) -> Any:
    """Return a config of a decoder and a tower."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {**_TEXT, **text},
        "vision_config": vision,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **keys,
    }


def _tiled(architecture: str, model_type: str, processor: str, *, is_split: bool, **text: Any) -> VisionCheckpoint:
    tiles = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
    return VisionCheckpoint(
        multimodal(
            architecture,
            model_type,
            {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4, **text},
            {**_SIGLIP, "model_type": f"{model_type}_vision"},
            image_token_id=_FIRST_MARKER,
            scale_factor=2,
        ),
        {
            "image_processor_type": processor,
            "do_convert_rgb": True,
            "do_image_splitting": is_split,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "max_image_size": {"longest_edge": 32},
            "resample": 1,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": 70},
        },
        "Idefics3Processor",
        "<image>",
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles),
        {},
        {"image_seq_len": 4},
    )


_QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 36,
}


def qwen(
    architecture: str,
    model_type: str,
    text: dict[str, Any],
    vision: dict[str, Any],
    processor: str = "Qwen3VLProcessor",
    video_processor: str = "Qwen3VLVideoProcessor",
) -> VisionCheckpoint:
    """Return a checkpoint of Qwen's, whose images have any size."""
    return VisionCheckpoint(
        multimodal(
            architecture,
            model_type,
            {"model_type": f"{model_type}_text", "rms_norm_eps": 1e-6, **text},
            {**_QWEN_VISION, "model_type": f"{model_type}_vision", **vision},
            image_token_id=_FIRST_MARKER,
            video_token_id=_FIRST_MARKER + 1,
            vision_start_token_id=_FIRST_MARKER + 2,
            vision_end_token_id=_FIRST_MARKER + 3,
        ),
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "image_mean": [0.5, 0.4, 0.5],
            "image_std": [0.5, 0.5, 0.25],
            "merge_size": 2,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 1024, "longest_edge": 3072},
        },
        processor,
        "<|vision_start|><|image_pad|><|vision_end|>",
        ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        {},
        {"video_processor": video_processor},
    )


_SECTIONS = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_theta": 1e4}

_ODD_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_heads": 3,
    "num_position_embeddings": 25,
    "out_hidden_size": 40,
}

_HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {**_SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
}


def _gemma(text: dict[str, Any]) -> VisionCheckpoint:
    return VisionCheckpoint(
        {
            **multimodal(
                "Gemma3ForConditionalGeneration",
                "gemma3",
                {"model_type": "gemma3_text", "rms_norm_eps": 1e-6, **text},
                {**_SIGLIP, "model_type": "siglip_vision_model", "image_size": 48, "vision_use_head": False},
                image_token_index=_FIRST_MARKER,
                boi_token_index=_FIRST_MARKER + 1,
                eoi_token_index=_FIRST_MARKER + 2,
                mm_tokens_per_image=9,
            ),
            "tie_word_embeddings": True,
        },
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_seq_length": 9,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": 48, "width": 48},
        },
        "Gemma3Processor",
        "<start_of_image>",
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        {"image_seq_length": 9},
    )


def gemma4(
    text: dict[str, Any],
    vision: dict[str, Any],
    architecture: str = "Gemma4ForConditionalGeneration",
    model_type: str = "gemma4",
    **keys: Any,
) -> VisionCheckpoint:
    """Return a checkpoint of Gemma 4."""
    tokens = {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    }
    return VisionCheckpoint(
        {
            **multimodal(
                architecture,
                model_type,
                {"model_type": "gemma4_text", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, **text},
                {"model_type": "gemma4_vision", "num_hidden_layers": 2, "patch_size": 4, **vision},
                image_token_id=_FIRST_MARKER,
                boi_token_id=_FIRST_MARKER + 1,
                eoi_token_id=_FIRST_MARKER + 2,
                audio_token_id=_FIRST_MARKER + 3,
                boa_token_id=_FIRST_MARKER + 4,
                eoa_token_index=_FIRST_MARKER + 5,
                video_token_id=_FIRST_MARKER + 6,
                **keys,
            ),
            "tie_word_embeddings": True,
        },
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": False,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
            "max_soft_tokens": 70,
            "patch_size": vision.get("patch_size", 4),
            "pooling_kernel_size": vision["pooling_kernel_size"],
            "resample": 3,
            "rescale_factor": 1 / 255,
        },
        "Gemma4Processor",
        "<|image|>",
        (*tokens.values(), "<|video|>"),
        tokens,
        {"feature_extractor": "Gemma4AudioFeatureExtractor", "video_processor": "Gemma4VideoProcessor"},
    )


GEMMA4_ROPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2


VISION_CHECKPOINTS: dict[str, VisionCheckpoint] = {
    "smolvlm_tiny": _tiled("SmolVLMForConditionalGeneration", "smolvlm", "SmolVLMImageProcessor", is_split=True),
    "idefics3_tiny": _tiled(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        "Idefics3ImageProcessorFast",
        is_split=False,
        num_key_value_heads=4,
    ),
    "qwen3_vl_tiny": qwen(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {"head_dim": 32, "rope_parameters": _SECTIONS},
        {"deepstack_visual_indexes": [2, 0]},
    ),
    "qwen3_vl_moe_odd_tiny": qwen(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "rope_parameters": {**_SECTIONS, "mrope_section": [4, 4, 4]},
        },
        {**_ODD_TOWER, "deepstack_visual_indexes": [1, 0]},
    ),
    "qwen3_5_vision_tiny": qwen(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {**_HYBRID, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {},
    ),
    "qwen3_5_moe_vision_odd_tiny": qwen(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        {
            **_HYBRID,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 40,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "rope_parameters": {**_SECTIONS, "mrope_section": [4, 3, 3], "partial_rotary_factor": 0.5},
        },
        _ODD_TOWER,
    ),
    "gemma3_vision_tiny": _gemma(
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 6,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_vision_tiny": gemma4(  # as the large models: images seen both ways, experts, standardised embeddings
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "layer_types": _ALTERNATING,
            "sliding_window": 24,
            "use_bidirectional_attention": "vision",
            "rope_parameters": GEMMA4_ROPE,
        },
        {
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "position_embedding_size": 160,
            "standardize": True,
        },
    ),
    "gemma4_vision_odd_tiny": gemma4(  # as the small models: embeddings for each layer, clipped matmuls, an audio encoder
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_hidden_layers": 6,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "global_head_dim": 40,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 8.0,
            "layer_types": [*_ALTERNATING, *_ALTERNATING[:2]],
            "sliding_window": 8,
            "pad_token_id": 9,
            "rope_parameters": GEMMA4_ROPE,
        },
        {
            "hidden_size": 28,
            "intermediate_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "patch_size": 5,
            "pooling_kernel_size": 3,
            "position_embedding_size": 211,
            "use_clipped_linears": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
        audio_config={
            "model_type": "gemma4_audio",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 16,
        },
    ),
}
