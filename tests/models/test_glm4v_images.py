"""Images of GLM-4.1V: sizes of any picture, and configs that are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import _bounded_size
from jaxserve.model_config.images import AreaSizes
from jaxserve.models.registry import read_decoder
from tests.models.goldens import DATA
from tests.models.vision_files import vision_of

MODEL = DATA / "vision" / "glm4v_tiny"


def changed(folder: Path, **keys: Any) -> Path:
    """Return a copy of the model with other values in its config; those of `vision_config` and `text_config` are added to it."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for table in ("vision_config", "text_config"):
        config[table] |= keys.pop(table, {})
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def test_sizes_of_pictures_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.glm4v.image_processing_pil_glm4v")
    random, refused = np.random.default_rng(0), 0
    for factor, low, high in ((28, 12_544, 9_633_792), (16, 2048, 6144), (16, 2049, 6143)):
        sizes = AreaSizes(low, high, 2, is_enlarged=True)
        for height, width in [*random.integers(1, 3000, (150, 2)).tolist(), *random.integers(1, 40, (50, 2)).tolist()]:
            try:
                expected = module.smart_resize(2, height, width, 2, factor, low, high)
            except ValueError:
                with pytest.raises(InvalidRequestError):
                    _bounded_size(height, width, factor, sizes)
                refused += 1
            else:
                assert _bounded_size(height, width, factor, sizes) == expected
    assert refused


def test_images_have_no_more_patches_than_the_encoder_takes() -> None:
    config = read_image_processor(MODEL)
    assert config is not None
    assert config.sizes == AreaSizes(2048, 6144, 2, is_enlarged=True)
    assert with_bounded_area(config, 4096).sizes == config.sizes
    bounded = with_bounded_area(config, 20).sizes
    assert bounded == replace(config.sizes, max_pixels=2 * 20 * 64)
    height, width = _bounded_size(300, 200, 16, bounded)
    assert height * width <= 20 * 64


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vision_config": {"out_hidden_size": 40}}, "vision_config.out_hidden_size is 40; supported: 48"),
        ({"vision_config": {"spatial_merge_size": 3}}, "vision_config.spatial_merge_size is 3; supported: 2"),
        ({"vision_config": {"image_size": 4}}, "vision_config.image_size is 4"),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"text_config": {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 4, 4]}}}, "mrope_section"),
    ],
)
def test_what_is_not_computed_is_refused_with_its_key(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        vision_of(changed(tmp_path, **keys))


@pytest.mark.parametrize(
    ("architecture", "kind", "layers", "heads"),
    [
        ("Glm4vForConditionalGeneration", "glm4v_text", 40, 32),
        ("Glm46VForConditionalGeneration", "glm4v_text", 40, 32),
        ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", 46, 96),
        ("Glm46VForConditionalGeneration", "glm4v_moe_text", 46, 96),
    ],
)
def test_a_text_part_has_the_class_that_its_type_names_and_the_sizes_of_transformers(
    architecture: str, kind: str, layers: int, heads: int, tmp_path: Path
) -> None:
    text: dict[str, Any] = {
        "model_type": kind,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    }
    text |= {"head_dim": 128} if kind == "glm4v_moe_text" else {}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    config, _ = read_decoder(tmp_path)
    assert (config.num_layers, config.num_heads, config.qkv_bias) == (layers, heads, True)
    assert (config.norm_placement == "sandwich") == (kind == "glm4v_text")
