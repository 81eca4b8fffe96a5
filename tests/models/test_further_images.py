"""Images of Muse Glimmer, Cosmos 3 Edge, VideoLLaMA 3 and HyperCLOVA X: sizes, and configs that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import _nearest_blocks, process_image
from jaxserve.model_config.preprocessing.images import NearestBlocks
from jaxserve.models.registry import decoder_of, open_model
from tests.models.goldens import DATA
from tests.models.vision_files import changed, processor_of

VISION = DATA / "vision"
MUSE = VISION / "muse_glimmer_vision_tiny"


@pytest.mark.parametrize(
    ("size", "block", "most", "expected"),
    [
        ((580, 1240), 12, 4096, (43, 93)),
        ((180, 1764), 28, 20, (1, 13)),
        ((28, 28), 28, 4096, (1, 1)),
        ((1, 1), 28, 4096, (1, 1)),
        ((3, 280), 28, 4096, (1, 10)),
        ((3000, 1500), 28, 256, (22, 11)),
    ],
)
def test_blocks_of_muse_glimmer_are_those_of_transformers(
    size: tuple[int, int], block: int, most: int, expected: tuple[int, int]
) -> None:
    """Heights and widths, and rows and columns that transformers' `smart_resize` makes of them."""
    assert _nearest_blocks(*size, block, most) == (expected[0] * block, expected[1] * block)


def test_a_strip_of_more_blocks_than_muse_glimmer_reads_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="1000 x 1 pixels, a strip that 4 blocks of 28 pixels cannot show"):
        _nearest_blocks(1, 1000, 28, 4)


def test_a_limit_on_patches_bounds_the_blocks_of_muse_glimmer() -> None:
    config = processor_of(MUSE)
    bounded = with_bounded_area(config, 19)
    assert bounded.sizes == NearestBlocks(4)
    (item,) = process_image(Image.fromarray(np.zeros((96, 96, 3), np.uint8)), bounded).items
    assert item.grid == (4, 4)


@pytest.mark.parametrize("name", ["minicpm_v4_6_tiny", "minicpm_v4_6_odd_tiny"])
def test_a_limit_on_patches_bounds_the_whole_image_and_the_slices_of_minicpm(name: str) -> None:
    config = processor_of(VISION / name)
    for most in (17, 32, 50):
        for size in ((300, 290), (64, 64), (40, 90), (20, 20)):
            items = process_image(Image.new("RGB", size), with_bounded_area(config, most)).items
            counts = [len(item.patches) for item in items]
            assert len(items) == len(process_image(Image.new("RGB", size), config).items)
            assert most / 4 <= min(counts) and max(counts) <= most


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "tables full_attention and sliding_attention"),
        ({"sliding_attention": {"rope_type": "default"}}, "a table or null for full_attention"),
        ({"sliding_attention": None, "full_attention": None}, "the same table for all layers that rotate"),
    ],
)
def test_tables_of_rope_that_the_layers_of_compass_need_are_named(
    table: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    model = VISION / "cohere_compass_tiny"
    text = {**open_model(model).config, "rope_parameters": table}
    text = {key: value for key, value in text.items() if key not in ("architectures", "multimodal_config")}
    with pytest.raises(CheckpointError, match=message):
        decoder_of(open_model(changed(tmp_path, model=model, text_config=text)))
