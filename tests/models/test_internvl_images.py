"""InternVL's images: tiles of any picture, the tensors of its tower, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.errors import CheckpointError
from jaxserve.frontend.images.processor import process_image
from jaxserve.frontend.images.tiles import grid_size
from jaxserve.model_config.images import GridTiles
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import vision_of

MODEL = DATA / "vision" / "internvl_tiny"
ODD = DATA / "vision" / "internvl_odd_tiny"
"""With the traits of InternViT-6B."""


def changed(folder: Path, processor: dict[str, Any] | None = None, **keys: Any) -> Path:
    """Return a copy of the model with other values in its config, those of `vision_config` added to it, and its preprocessing."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= keys.pop("vision_config", {})
    (folder / "config.json").write_text(json.dumps(config | keys))
    table = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(table | (processor or {})))
    return folder


def test_grids_of_pictures_of_any_size_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    random = np.random.default_rng(0)
    for side, least, most in ((448, 1, 12), (24, 1, 4), (30, 3, 6)):
        for height, width in random.integers(1, 1500, (100, 2)).tolist():
            expected = module.get_optimal_tiled_canvas((height, width), (side, side), least, most)
            assert grid_size(width, height, GridTiles(side, least, most)) == expected


def test_the_tokens_of_all_tiles_follow_each_other_and_the_whole_image_is_the_last_tile() -> None:
    config = read_image_processor(MODEL)
    assert config is not None
    processed = process_image(picture(80, 50, 0), config)
    assert processed.text == "<img>" + 12 * "<IMG_CONTEXT>" + "</img>"
    assert [item.num_tokens for item in processed.items] == [4, 4, 4]
    (small,) = process_image(picture(20, 22, 0), config).items
    assert (len(small.patches), small.positions[0].tolist(), small.num_tokens) == (17, [0, -1], 4)


def test_the_large_tower_has_other_norms_and_biases_than_the_small_one() -> None:
    small, large = vision_of(MODEL), vision_of(ODD)
    assert (small.has_qkv_biases, small.has_rms_norms, small.joint_norm_eps, small.has_final_norm) == (
        True,
        False,
        None,
        False,
    )
    assert (large.has_qkv_biases, large.has_rms_norms, large.joint_norm_eps, large.has_final_norm) == (
        False,
        True,
        1e-6,
        True,
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
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
)
def test_what_is_not_computed_is_refused_with_its_key(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        vision_of(changed(tmp_path, **keys))
