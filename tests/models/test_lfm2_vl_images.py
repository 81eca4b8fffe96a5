"""LFM2-VL's images: whole or in tiles, the text around them, and configs that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoint.preprocessing.tiles import FIRST_LFM2_VL
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import process_image
from jaxserve.model_config.preprocessing.images import AreaSizes, TiledAreas
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import changed, processor_of, vision_of
from tests.models.vision_model import count_tokens

MODEL = DATA / "vision" / "lfm2_vl_tiny"


def test_tiles_have_marks_and_a_small_image_has_none_of_its_own() -> None:
    config = processor_of(MODEL)
    large, small = (process_image(picture(*size, 0), config).text for size in ((80, 50), (20, 22)))
    tiles = "".join(f"<|img_row_1_col_{column}|>{4 * '<image>'}" for column in (1, 2))
    assert large == f"<|image_start|>{tiles}<|img_thumbnail|>{3 * '<image>'}<|image_end|>"
    assert small == f"<|image_start|>{4 * '<image>'}<|image_end|>"


def test_the_whole_image_follows_its_tiles_only_if_the_preprocessing_says_so(tmp_path: Path) -> None:
    config = processor_of(changed(tmp_path, MODEL, {"use_thumbnail": False}))
    assert count_tokens(80, 50, config) == [4, 4]
    assert process_image(picture(80, 50, 0), config).text.endswith("<image><|image_end|>")


@pytest.mark.parametrize("keys", [{"do_image_splitting": False}, {"max_tiles": 1}])
def test_images_are_whole_without_tiles(keys: dict[str, Any], tmp_path: Path) -> None:
    config = processor_of(changed(tmp_path, MODEL, keys))
    assert config.sizes == AreaSizes(2 * 256, 6 * 256, has_whole_blocks=True)
    assert count_tokens(80, 50, config) == [3]


def test_sizes_are_those_of_published_checkpoints_where_the_preprocessing_names_none(tmp_path: Path) -> None:
    folder = changed(tmp_path, MODEL, downsample_factor=2, vision_config={"patch_size": 16})
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Lfm2VlImageProcessorFast"}')
    config = processor_of(folder)
    # transformers' numbers of tokens
    assert count_tokens(384, 256, config) == [96]
    assert count_tokens(512, 512, config) == [256]
    assert count_tokens(1000, 3000, config) == [256, 256, 256, 243]
    assert config.resampling == "bilinear" and vision_of(folder).patch_size == 16


def test_a_bound_on_patches_reduces_images_and_leaves_out_tiles_that_exceed_it() -> None:
    config = processor_of(MODEL)
    assert isinstance(config.sizes, TiledAreas)
    whole = replace(config.sizes.whole, bound=20 * 64)
    assert with_bounded_area(config, 20).sizes == replace(config.sizes, whole=whole)
    assert with_bounded_area(config, 12).sizes == replace(config.sizes.whole, bound=12 * 64)


def test_the_table_of_the_joint_file_comes_first_and_its_flag_removes_marks(tmp_path: Path) -> None:
    """transformers reads checkpoints with both files so."""
    folder = changed(tmp_path, MODEL)
    joint: dict[str, Any] = {"processor_class": "Lfm2VlProcessor", "use_image_special_tokens": False}
    (folder / "processor_config.json").write_text(json.dumps(joint))
    assert process_image(picture(80, 50, 0), processor_of(folder)).text == 11 * "<image>"
    own = json.loads((folder / "preprocessor_config.json").read_text())
    joint = {"image_processor": own | {"use_thumbnail": False}, "use_image_special_tokens": True}
    (folder / "processor_config.json").write_text(json.dumps(joint))
    assert process_image(picture(80, 50, 0), processor_of(folder)).text.count("<image>") == 8


def test_the_first_releases_have_their_tiles_in_the_joint_file_and_the_name_of_another_preprocessing(
    tmp_path: Path,
) -> None:
    folder = changed(tmp_path, MODEL)
    own = json.loads((folder / "preprocessor_config.json").read_text())
    of_tiles = {key: own.pop(key) for key in FIRST_LFM2_VL}
    own |= {"image_processor_type": "Siglip2ImageProcessor", "do_resize": True, "patch_size": 8, "max_num_patches": 24}
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Lfm2VlProcessor", **of_tiles}))
    assert processor_of(folder) == processor_of(MODEL)


def test_a_norm_that_the_config_does_not_name_is_not_read(tmp_path: Path) -> None:
    vision = vision_of(changed(tmp_path, MODEL, projector_use_layernorm=False))
    assert vision.connector == "projector" and "connector.norm." in vision.unused_tensors
