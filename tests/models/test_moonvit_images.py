"""Images of Kimi K2.5: sizes, files as published and as transformers saves them, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import _reduced_size, process_image
from jaxserve.model_config.preprocessing.images import PaddedSizes
from jaxserve.models.registry import open_model
from tests.models.goldens import DATA
from tests.models.vision_files import processor_of, vision_of
from tests.unit.checkpoint.checkpoint_files import write_safetensors

NOTHING: Mapping[str, Any] = MappingProxyType({})
MODEL = DATA / "vision" / "kimi_k25_tiny"
PUBLISHED = {
    "vt_hidden_size": 24,
    "vt_intermediate_size": 40,
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
    "init_pos_emb_height": 5,
    "init_pos_emb_width": 5,
    "init_pos_emb_time": 4,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 24,
    "mm_projector_type": "patchmerger",
    "patch_size": 8,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 48,
    "video_attn_type": "spatial_temporal",
}
PREPROCESSING = {
    "in_patch_limit": 48,
    "patch_limit_on_one_side": 9,
    "in_patch_limit_each_frame": 16,
    "patch_size": 8,
    "merge_kernel_size": 2,
    "image_mean": [0.5, 0.4, 0.5],
    "image_std": [0.5, 0.5, 0.25],
    "fixed_output_tokens": None,
    "sample_fps": 2.0,
    "temporal_merge_kernel_size": 4,
}


def published(
    folder: Path, vision: Mapping[str, Any] = NOTHING, processing: Mapping[str, Any] = NOTHING, **keys: Any
) -> Path:
    """Return a copy of the model with files as published, and other values in them."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for key in ("image_token_id", "video_token_id", "projection_hidden_size"):
        del config[key]
    config |= {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "media_placeholder_token_id": 3,
        "use_unified_vision_chunk": True,
        "vision_config": PUBLISHED | dict(vision),
        "text_config": config["text_config"] | {"model_type": "kimi_k2"},
    }
    (folder / "config.json").write_text(json.dumps(config | keys))
    table = {"auto_map": {"AutoImageProcessor": "x.Y"}, "media_proc_cfg": PREPROCESSING | dict(processing)}
    (folder / "preprocessor_config.json").write_text(json.dumps(table))
    return folder


def test_published_files_are_read_as_those_of_transformers(tmp_path: Path) -> None:
    found = published(tmp_path)
    assert processor_of(found) == processor_of(MODEL)
    assert vision_of(found) == vision_of(MODEL)


def test_names_that_transformers_saves_are_read(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    stored = open_safetensors(MODEL / "model.safetensors")
    names = {
        name: name.replace("language_model.model.layers.", "language_model.model.blocks.")
        .replace("vision_tower.patch_embed.proj.", "vision_tower.encoder.patch_embed.proj.")
        .replace("mm_projector.pre_norm.", "model.mm_projector.pre_norm.")
        for name in stored.tensors
    }
    write_safetensors(tmp_path / "model.safetensors", {new: np.array(stored.read(old)) for old, new in names.items()})
    found, expected = open_model(tmp_path), open_model(MODEL)
    assert found.tensors.keys() == expected.tensors.keys()
    for name in ("vision.position_embedding.weight", "model.layers.1.self_attn.o_proj.weight"):
        np.testing.assert_array_equal(found.read(name), expected.read(name))


@pytest.mark.parametrize(
    ("limits", "size", "expected"),
    [
        ((16384, 512), (1, 1), (1, 1)),
        ((16384, 512), (600, 800), (600, 800)),
        ((16384, 512), (2000, 3000), (1468, 2202)),
        ((16384, 512), (2160, 3840), (1345, 2392)),
        ((16384, 512), (1, 9000), (1, 7168)),
        ((16384, 512), (13, 20000), (4, 7168)),
        ((48, 9), (600, 800), (84, 113)),
        ((48, 9), (2160, 3840), (70, 126)),
        ((48, 9), (5000, 70), (126, 1)),
        ((48, 9), (29, 57), (29, 57)),
    ],
)
def test_images_are_reduced_as_by_transformers(
    limits: tuple[int, int], size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert _reduced_size(*size, 14, limits[1], limits[0]) == expected


def test_margins_are_black_and_at_the_right_and_lower_end() -> None:
    config = processor_of(MODEL)
    (item,) = process_image(Image.new("RGB", (20, 10), (255, 255, 255)), config).items
    assert (item.grid, item.num_tokens) == ((2, 4), 2)
    bright = item.patches.reshape(len(item.patches), 3, 8, 8)
    for patch, (row, column) in zip(bright, item.positions * 8, strict=True):
        expected = np.zeros((8, 8))
        expected[: max(10 - row, 0), : max(20 - column, 0)] = 255
        np.testing.assert_array_equal(patch, np.stack([expected] * 3))


def test_images_have_no_more_patches_than_the_encoder_takes_margins_included() -> None:
    config = processor_of(MODEL)
    config = replace(config, sizes=PaddedSizes(1024, 64))
    for bound in (4, 9, 40, 200):
        bounded = with_bounded_area(config, bound)
        for size in ((300, 290), (1, 1), (2000, 3), (17, 33), (64, 16)):
            image = Image.new("RGB", size)
            count = len(process_image(image, bounded).items[0].patches)
            assert count <= bound
            whole = len(process_image(image, config).items[0].patches)
            assert count == whole if whole <= bound else count > bound / 8


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vision": {"merge_type": "other"}}, "vision_config.merge_type is 'other'; supported: 'sd2_tpool'"),
        ({"vision": {"mm_projector_type": "mlp"}}, "vision_config.mm_projector_type is 'mlp'"),
        ({"vision": {"pos_emb_type": "learned"}}, "vision_config.pos_emb_type is 'learned'"),
        ({"vision": {"projector_hidden_act": "silu"}}, "vision_config.projector_hidden_act is 'silu'"),
        ({"vision": {"text_hidden_size": 40}}, "vision_config.text_hidden_size is 40"),
        ({"vision": {"mm_hidden_size": 40}}, "vision_config.mm_hidden_size is 40; supported: 24"),
        ({"vision": {"merge_kernel_size": [1, 2]}}, r"vision_config.merge_kernel_size is \[1, 2\]"),
        ({"vision": {"init_pos_emb_width": 6}}, "vision_config.init_pos_emb_width is 6; supported: 5"),
        ({"vision": {"patch_size": 7}}, "vision_config.patch_size is 7; supported: 8"),
        ({"vision": {"vt_num_attention_heads": 5}}, "vision_config.vt_hidden_size is 24"),
        ({"vision": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"processing": {"fixed_output_tokens": 64}}, "fixed_output_tokens: expected null, found '64'"),
        ({"processing": {"patch_limit_on_one_side": 0}}, "max_height: expected an integer from 1"),
        ({"media_placeholder_token_id": None}, "image_token_index: expected an integer"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_with_its_key(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        vision_of(published(tmp_path, **keys))
