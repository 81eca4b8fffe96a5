"""Configs and preprocessing of models that read images, of which something is not computed, are refused with the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import CheckpointError
from tests.models.goldens import DATA
from tests.models.vision_files import changed, vision_of

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "qwen2_5_vl_tiny": [
        ({"processor": {"size": {"height": 32, "width": 32}}}, "min_pixels: expected an integer"),
    ],
    "cohere2_vision_tiny": [
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type is 'clip_vision_model'"),
        ({"vision_config": {"image_size": 48}}, "vision_config.image_size is 48; supported: 32"),
        ({"alignment_intermediate_size": 81}, "alignment_intermediate_size is 81; supported: an even number"),
        ({"processor": {"patch_size": 4}}, "patch_size: expected 2, the tokens of a tile's side, found '4'"),
        ({"processor": {"size": {"height": 32, "width": 16}}}, "size: expected a square"),
        ({"processor": {"max_patches": 0}}, "max_patches: expected an integer"),
    ],
    "aya_vision_tiny": [
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
        ({"alignment_intermediate_size": 81}, "alignment_intermediate_size is 81; supported: an even number"),
        ({"downsample_factor": 3}, "image_size"),
    ],
    "lfm2_vl_tiny": [
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ({"downsample_factor": 4}, "downsample_factor is 4; supported: 2"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type is 'siglip_vision_model'"),
        ({"vision_config": {"num_patches": 35}}, "vision_config.num_patches"),
        ({"vision_config": {"patch_size": [8, 4]}}, "vision_config.patch_size"),
        ({"vision_config": {"patch_size": 4}}, "vision_config.patch_size is 4"),
        ({"processor": {"min_tiles": 1}}, "min_tiles: expected an integer from 2 to 4"),
        ({"processor": {"min_tiles": 5}}, "min_tiles: expected an integer from 1 to 4"),
        ({"processor": {"tile_size": 40}}, "tile_size: expected pixels of whole blocks of 16 pixels"),
        ({"processor": {"min_image_tokens": 7}}, "min_image_tokens: expected an integer from 1 to 6"),
    ],
    "minicpm_v4_6_tiny": [
        ({"merger_times": 2}, "merger_times is 2; supported: 1"),
        ({"drop_vision_last_layer": True}, "drop_vision_last_layer is true; supported: false"),
        ({"merge_kernel_size": [2, 4]}, "merge_kernel_size is .*; supported: a square"),
        ({"vision_config": {"window_kernel_size": [4, 4]}}, "window_kernel_size is .*; supported: 2 x 2"),
        ({"insert_layer_id": 3}, "insert_layer_id is 3"),
        ({"downsample_mode": "4x"}, "downsample_mode is '4x'; supported: '16x'"),
        ({"processor": {"downsample_mode": "8x"}}, "downsample_mode: expected 16x or 4x"),
        ({"processor": {"max_slice_nums": 65}}, "max_slice_nums: expected an integer from 1 to 64"),
    ],
    "internvl_tiny": [
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        ({"vision_config": {"norm_type": "batch_norm"}}, "vision_config.norm_type is 'batch_norm'"),
        ({"vision_config": {"use_absolute_position_embeddings": False}}, "use_absolute_position_embeddings is false"),
        ({"vision_config": {"image_size": [24, 30]}}, "vision_config.image_size"),
        ({"vision_config": {"image_size": 30}}, "vision_config.image_size is 30"),
        ({"processor": {"size": {"height": 24, "width": 30}}}, "size: expected a square"),
        ({"processor": {"max_patches": 0}}, "max_patches: expected an integer"),
        ({"downsample_ratio": 2.0}, "downsample_ratio"),
    ],
    "llama4_vision_tiny": [
        ({"vision_config": {"vision_feature_select_strategy": "full"}}, "vision_feature_select_strategy is 'full'"),
        ({"vision_config": {"multi_modal_projector_bias": True}}, "multi_modal_projector_bias is true"),
        (
            {"vision_config": {"projector_input_dim": 24}},
            "projector_input_dim is 24; supported: 40, projector_output_dim",
        ),
        ({"vision_config": {"vision_output_dim": 24}}, "vision_output_dim is 24; supported: 40, projector_output_dim"),
        (
            {"vision_config": {"intermediate_size": 64}},
            "intermediate_size is 64; supported: 128, the width of a block of patches",
        ),
        ({"vision_config": {"image_size": 42}}, "image_size is 42; supported: the size of the preprocessing's tiles"),
        ({"vision_config": {"pixel_shuffle_ratio": 2.0}}, "pixel_shuffle_ratio"),
        ({"processor": {"size": {"height": 28, "width": 21}}}, "size: expected a square"),
        ({"processor": {"max_patches": 0}}, "max_patches: expected an integer"),
        ({"processor": {"do_resize": False}}, "do_resize: expected true"),
    ],
    "lfm3_vl_tiny": [
        ({"vision_config": {"conv_kernel_size": 4}}, "vision_config.conv_kernel_size is 4"),
        ({"vision_config": {"num_key_value_heads": 3}}, "vision_config.num_key_value_heads is 3"),
        ({"vision_config": {"spatial_merge_size": 1}}, "vision_config.spatial_merge_size is 1; supported: 2"),
        ({"vision_config": {"layer_types": ["conv", "full_attention"]}}, "vision_config.layer_types"),
        ({"vision_config": {"layer_types": ["conv", "conv", "sliding_attention"]}}, "vision_config.layer_types"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}}, "rope_type is 'yarn'"),
    ],
    "mistral3_vision_tiny": [
        ({"vision_feature_layer": -2}, "vision_feature_layer"),
        ({"vision_config": {"patch_size": 0}}, "patch_size"),
        ({"vision_config": {"head_dim": 8}}, "head_dim"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "model_type"),
    ],
    "pixtral_tiny": [
        ({"vision_config": {"model_type": "dinov2"}}, "vision_config.model_type is 'dinov2'"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "vision_config.model_type is 'siglip_vision_model'"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer"),
        ({"processor": {"size": {"height": 32, "width": 32}}}, "longest_edge: expected an integer"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
        ({"projector_hidden_act": "relu7"}, "projector_hidden_act"),
        ({"model_type": "llava_next"}, "vision_config.model_type is 'pixtral'"),
    ],
    "llava_tiny": [
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        ({"vision_feature_layer": [-2, "1"]}, "vision_feature_layer"),
        ({"processor": {"crop_size": 21}}, "image_size is 28; supported: 21"),
        ({"processor": {"crop_size": 35}}, "crop_size: expected a square with sides of at most 33 pixels"),
        ({"processor": {"do_center_crop": False}}, "do_center_crop: expected true"),
    ],
    "llava_siglip_odd_tiny": [
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
        ({"processor": {"size": {"height": 25, "width": 30}}}, "size: expected a square"),
    ],
    "llava_next_tiny": [
        ({"image_grid_pinpoints": [[28, 28]]}, "image_grid_pinpoints: expected those of the preprocessing"),
        ({"image_grid_pinpoints": None}, "image_grid_pinpoints: expected those of config.json"),
        ({"processor": {"crop_size": 21}}, "crop_size: expected 28 pixels"),
        ({"processor": {"crop_size": 21, "do_center_crop": False}}, "crop_size: expected 28 pixels"),
        ({"processor": {"image_grid_pinpoints": [[28, 30]]}, "image_grid_pinpoints": [[28, 30]]}, "whole tiles"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        ({"vision_feature_layer": [-2, 0]}, "vision_feature_layer"),
        ({"processor": {"image_processor_type": "CLIPImageProcessor"}}, "model_type is 'llava_next'"),
    ],
    "llava_onevision_tiny": [
        ({"vision_aspect_ratio": "square"}, "vision_aspect_ratio: expected anyres_max_N"),
        ({"processor": {"do_center_crop": True}}, "do_center_crop: expected null"),
    ],
    "vipllava_tiny": [
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "model_type is 'siglip_vision_model'"),
    ],
    "ovis2_tiny": [
        ({"visual_indicator_token_ids": [5, 6, 7, 8]}, "visual_indicator_token_ids: expected the ids of <IMG_START>"),
        ({"processor": {"size": {"height": 28, "width": 35}}}, "size: expected a square"),
        ({"processor": {"size": {"height": 21, "width": 21}}}, "image_size is 28"),
        ({"processor": {"min_patches": 5}}, "min_patches: expected an integer from 1 to 4"),
        ({"hidden_size": 40}, "hidden_size is 40; supported: 48"),
    ],
    "paligemma_tiny": [
        ({"projection_dim": 40}, "projection_dim is 40; supported: 48"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type is 'clip_vision_model'"),
        ({"processor": {"size": {"height": 40, "width": 40}}}, "image_size is 32; supported: 40"),
    ],
    "glm4v_tiny": [
        ({"vision_config": {"out_hidden_size": 40}}, "vision_config.out_hidden_size is 40; supported: 48"),
        ({"vision_config": {"spatial_merge_size": 3}}, "vision_config.spatial_merge_size is 3; supported: 2"),
        ({"vision_config": {"image_size": 4}}, "vision_config.image_size is 4"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"text_config": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 4, 4]}}}, "mrope_section"),
    ],
    "gemma4_vision_odd_tiny": [
        ({"vision_config": {"head_dim": 14}}, r"vision_config.head_dim is 14; supported: a multiple of 4"),
        ({"vision_config": {"num_key_value_heads": 1}}, r"num_key_value_heads is 1; supported: 3"),
        (
            {"vision_config": {"position_embedding_size": 209}},
            r"position_embedding_size is 209; supported: at least 210",
        ),
        ({"vision_config": {"pooling_kernel_size": 2}}, r"pooling_kernel_size is 2; supported: 3"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10.0}}}, r"rope_type is 'yarn'"),
        ({"vision_config": {"attention_bias": True}}, r"attention_bias is true"),
    ],
    "gemma4_unified_vision_tiny": [
        ({"vision_config": {"mm_posemb_size": 69}}, "vision_config.mm_posemb_size is 69; supported: at least 70"),
        ({"vision_config": {"output_proj_dims": 48}}, "vision_config.output_proj_dims is 48; supported: 40"),
        (
            {"vision_config": {"patch_size": 8}},
            r"vision_config.patch_size is 8; supported: 8 / pooling_kernel_size \(2\)",
        ),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "use_bidirectional_attention is 'all'"),
    ],
    "muse_glimmer_vision_tiny": [
        ({"vision_config": {"layer_norm_eps": 1e-6}}, "layer_norm_eps is 1e-06"),
        ({"vision_config": {"pos_emb_width": 6}}, "pos_emb_width is 6; supported: 4"),
        ({"vision_config": {"pos_emb_height": 5}}, "pos_emb_height: expected whole blocks"),
        ({"vision_config": {"layer_types": ["full_attention"]}}, "layer_types"),
        ({"out_hidden_size": 24}, "out_hidden_size is 24; supported: 96"),
    ],
    "cosmos3_edge_tiny": [
        ({"vision_config": {"num_patches": 35}}, "num_patches is 35; supported: a square number"),
        ({"processor": {"temporal_patch_size": 2}}, "temporal_patch_size"),
    ],
    "video_llama3_tiny": [
        ({"processor": {"merge_size": 3}}, "merge_size"),
        ({"processor": {"temporal_patch_size": 2}}, "temporal_patch_size"),
    ],
    "hyperclovax_vision_v2_tiny": [
        ({"model_type": "other"}, "model_type is 'other'"),
    ],
    "paddleocr_vl_tiny": [
        ({"text_config": {"rope_is_neox_style": False}}, "rope_is_neox_style is false"),
        ({"text_config": {"use_3d_rope": False}}, "use_3d_rope is false"),
        ({"text_config": {"compression_ratio": 2.0}}, "compression_ratio is 2.0"),
        ({"text_config": {"rope_scaling": {"mrope_section": [16, 24, 23]}}}, "mrope_section"),
    ],
    "lighton_ocr_tiny": [
        ({"processor": {"patch_size": 24}}, "patch_size: expected 16, the side of 2 patches, found '24'"),
        ({"multimodal_projector_bias": True}, "multimodal_projector_bias is true"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'"),
    ],
    "granite_docling_tiny": [
        ({"processor": {"fine_route": True}}, "fine_route: expected false"),
        ({"processor": {"min_patches": 9}}, "min_patches: expected an integer from 1 to 4"),
        ({"vision_config": {"out_hidden_size": 1024}}, "out_hidden_size is 1024"),
    ],
    "qianfan_ocr_tiny": [
        ({"vision_config": {"qkv_bias": False}}, "vision_config.qkv_bias is"),
        ({"vision_config": {"qk_normalization": True}}, "vision_config.qk_normalization is"),
    ],
}
"""By tiny checkpoint: values of its config or, as `processor`, of its preprocessing, and what the error says."""


@pytest.mark.parametrize(("name", "keys", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows])
def test_what_is_not_computed_is_refused_with_its_key(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        vision_of(changed(tmp_path, DATA / "vision" / name, **keys))
