"""Images of GLM-4.1V and GLM-OCR: sizes of any picture, configs that are refused, and defaults of text parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import bounded_size
from jaxserve.model_config.preprocessing.images import AreaSizes
from jaxserve.models.registry import read_decoder
from tests.models.goldens import DATA
from tests.models.vision_files import changed, processor_of, vision_of

MODEL = DATA / "vision" / "glm4v_tiny"


def test_sizes_of_pictures_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.glm4v.image_processing_pil_glm4v")
    random, refused = np.random.default_rng(0), 0
    for factor, low, high in ((28, 12_544, 9_633_792), (16, 2048, 6144), (16, 2049, 6143)):
        sizes = AreaSizes(low, high, 2, "both")
        for height, width in [*random.integers(1, 3000, (150, 2)).tolist(), *random.integers(1, 40, (50, 2)).tolist()]:
            try:
                expected = module.smart_resize(2, height, width, 2, factor, low, high)
            except ValueError:
                with pytest.raises(InvalidRequestError):
                    bounded_size(height, width, factor, sizes)
                refused += 1
            else:
                assert bounded_size(height, width, factor, sizes) == expected
    assert refused


def test_images_have_no_more_patches_than_the_encoder_takes() -> None:
    config = processor_of(MODEL)
    assert config.sizes == AreaSizes(2048, 6144, 2, "both")
    bounded = with_bounded_area(config, 20).sizes
    assert isinstance(bounded, AreaSizes) and bounded == replace(config.sizes, bound=20 * 64)
    small = replace(bounded, bound=12 * 64)  # less than the fewest pixels, to which images are enlarged
    for sizes in (bounded, small):
        for height, width in ((300, 200), (21, 17), (40, 64)):
            rows, columns = bounded_size(height, width, 16, sizes)
            assert 4 * 64 <= rows * columns <= (sizes.bound or 0)


def test_a_head_of_glm_ocr_has_norms_and_layers_have_a_width_of_their_own(tmp_path: Path) -> None:
    vision = vision_of(changed(tmp_path, DATA / "vision" / "glm_ocr_tiny", vision_config={"image_size": 4}))
    assert (vision.intermediate_size, vision.connector_width, vision.positions) == (56, 3 * 48, "none")
    assert vision.has_head_norms and vision.has_biases and not vision.has_patch_norm


def test_biases_that_glm_ocr_does_not_have_are_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, DATA / "vision" / "glm_ocr_tiny", text_config={"attention_bias": True})
    with pytest.raises(CheckpointError, match="attention_bias is true; supported: false or null"):
        vision_of(path)


@pytest.mark.parametrize(
    ("architecture", "kind", "layers", "heads"),
    [
        ("Glm4vForConditionalGeneration", "glm4v_text", 40, 32),
        ("Glm46VForConditionalGeneration", "glm4v_text", 40, 32),
        ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", 46, 96),
        ("Glm46VForConditionalGeneration", "glm4v_moe_text", 46, 96),
        ("GlmOcrForConditionalGeneration", "glm_ocr_text", 16, 16),
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
    whole = {"architectures": [architecture], "model_type": kind.removesuffix("_text"), "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, _ = read_decoder(tmp_path)
    assert (config.num_layers, config.num_heads, config.qkv_bias) == (layers, heads, kind != "glm_ocr_text")
    assert (config.norm_placement == "sandwich") == (kind != "glm4v_moe_text")
