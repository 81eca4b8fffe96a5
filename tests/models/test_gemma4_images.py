"""Gemma 4's images: budgets of patches, sizes of strips, encoder calls, steps that hold an image, and configs that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.config import Config, ImagesConfig, ModelConfig, SchedulerConfig
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.frontend.images.prepared import with_bounded_area
from jaxserve.frontend.images.processor import budget_size, process_image
from jaxserve.model_config.preprocessing.images import BudgetSizes
from jaxserve.models.registry import open_model, read_decoder
from jaxserve.runner.images.encoder import image_settings, image_shape
from jaxserve.runner.images.served import with_served_images
from tests.models.goldens import DATA
from tests.models.vision_files import processor_of, vision_of
from tests.models.vision_model import count_tokens

LARGE, SMALL = (DATA / "vision" / name for name in ("gemma4_vision_tiny", "gemma4_vision_odd_tiny"))
"""Tiny models like the large published ones, whose images are seen both ways, and like the small ones."""


@pytest.mark.slow
def test_sizes_of_any_picture_equal_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.gemma4.image_processing_pil_gemma4")
    published = replace(processor_of(SMALL), patch_size=16, sizes=BudgetSizes(280 * 9))
    random = np.random.default_rng(0)
    for config in (processor_of(LARGE), processor_of(SMALL), published):
        assert isinstance(config.sizes, BudgetSizes)
        sides = np.exp(random.uniform(0, np.log(9000), (300, 2))).astype(int).tolist()
        for width, height in [*sides, (1, 4000), (4000, 1), (1, 1)]:
            rows, columns = module.get_aspect_ratio_preserving_size(
                height, width, config.patch_size, config.sizes.max_patches, config.merge
            )
            found = budget_size(height, width, config.patch_size, config.merge, config.sizes.max_patches)
            assert found == (rows, columns), (width, height)


@pytest.mark.parametrize(("width", "height"), [(600, 3), (3, 600)])
def test_a_strip_becomes_one_row_or_column_of_tokens(width: int, height: int) -> None:
    config = processor_of(LARGE)
    (item,) = process_image(Image.new("RGB", (width, height)), config).items
    assert max(item.grid) == 140 and min(item.grid) == 2 and item.num_tokens == 70


def test_a_smaller_budget_reduces_images_and_one_that_shows_nothing_is_refused() -> None:
    config = with_bounded_area(processor_of(LARGE), 100)
    assert config.sizes == BudgetSizes(100) and count_tokens(80, 50, config) == [6 * 3]
    assert with_bounded_area(config, 4096).sizes == BudgetSizes(100)
    with pytest.raises(InvalidRequestError, match="3 patches cannot show it"):
        count_tokens(20, 20, with_bounded_area(config, 3))


def test_encoder_calls_have_the_size_of_a_budget() -> None:
    tower = vision_of(LARGE)
    assert tower.patch_budget == 280 and tower.most_patches == 280
    assert image_shape(tower, ImagesConfig(), "cpu", 4).buckets == (280,)
    assert image_shape(tower, ImagesConfig(max_image_patches=101), "cpu", 4).buckets == (100,)
    assert image_shape(tower, ImagesConfig(max_image_patches=900), "cpu", 4).buckets == (280, 840)
    published = replace(tower, merge=3, patch_budget=280 * 9)
    assert image_shape(published, ImagesConfig(), "cpu", 4).buckets == (2520,)
    assert image_shape(published, ImagesConfig(), "gpu", 2).buckets == (2520, 10_080)
    largest = replace(published, patch_budget=1120 * 9)
    assert image_shape(largest, ImagesConfig(), "cpu", 4).buckets == (4095,)
    assert image_shape(largest, ImagesConfig(), "gpu", 2).buckets == (10_080,)
    with pytest.raises(ConfigError, match="--max-image-patches 3: 4 patches make one token"):
        image_shape(tower, ImagesConfig(max_image_patches=3), "cpu", 4)


def test_a_step_holds_the_largest_image_that_is_seen_both_ways() -> None:
    plain = Config(model=ModelConfig(model="model"))
    large, small = (with_served_images(ImagesConfig(), *_decoder(path)) for path in (LARGE, SMALL))
    assert large.vision is not None and large.vision.bidirectional_layers == "sliding"
    assert small.vision is not None and not small.vision.is_bidirectional
    few = replace(plain, scheduler=SchedulerConfig(max_num_batched_tokens=72, max_num_seqs=4))
    with pytest.raises(ConfigError, match=r"up to 70 tokens.*use 73, or"):
        image_settings(few, large, "cpu")
    assert image_settings(few, small, "cpu") is few
    reduced = replace(few, images=ImagesConfig(max_image_patches=200))
    assert image_settings(reduced, large, "cpu") is reduced
    published = replace(large, vision=replace(large.vision, patch_budget=280 * large.vision.block))
    assert image_settings(plain, published, "cpu").scheduler.max_num_batched_tokens == 280 + 31


def _decoder(path: Path) -> Any:
    decoder, checkpoint = read_decoder(path)
    return decoder, path, checkpoint


def test_an_audio_encoder_is_left_out_and_the_bounds_of_a_clipped_matmul_become_one_vector() -> None:
    checkpoint = open_model(SMALL)
    assert not any("audio" in name for name in checkpoint.tensors)
    name = "vision.layers.1.mlp.down_proj.bounds"
    bounds = np.asarray(checkpoint.read(name), np.float32)
    assert checkpoint.tensors[name].shape == (4,) and len(set(bounds.tolist())) == 4
    assert (np.sign(bounds) == (-1, 1, -1, 1)).all()
