"""The number of parts of an encoder call, and the memory between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.config import ImagesConfig, SchedulerConfig
from jaxserve.model_config.vision import Normalization, VisionConfig
from jaxserve.runner.buckets import largest_step_work
from jaxserve.runner.images.encoder import image_shape
from jaxserve.runner.images.parts import divide, layer_work

SMOLVLM = VisionConfig(  # SmolVLM-256M's
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    patch_size=16,
    norm_eps=1e-6,
    activation="gelu_tanh",
    positions="table",
    positions_per_side=32,
    connector="linear",
    connector_eps=1e-6,
    merge=4,
    output_size=576,
    normalization=Normalization(1 / 255, (0.5,) * 3, (0.5,) * 3),
    image_token_id=3,
    image_patches=1024,
)
DECODER_WEIGHTS = 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
"""Multiplications of a token in the layers of SmolVLM-256M's decoder."""


def test_a_part_has_the_work_of_the_largest_step_by_hand() -> None:
    layer = 1024 * (4 * 768**2 + 2 * 768 * 3072 + 2 * 1024 * 768)
    assert layer_work(SMOLVLM, 1024) == layer == 8_858_370_048
    step = largest_step_work("cpu", SchedulerConfig(), DECODER_WEIGHTS, 1)
    assert step == 128 * DECODER_WEIGHTS == 13_589_544_960  # 1.5 layers
    parts = divide(SMOLVLM, (1024,), step)
    assert parts is not None and parts.counts == (12,)
    halved = divide(SMOLVLM, (1024,), 2 * step)  # 3.07 layers
    assert halved is not None and halved.counts == (4,)


@pytest.mark.parametrize("num_layers", range(1, 14))
@pytest.mark.parametrize("num_patches", [1024, 2048, 4096])
def test_no_part_has_more_work_than_a_step_unless_one_layer_has(num_layers: int, num_patches: int) -> None:
    vision, step = replace(SMOLVLM, num_layers=num_layers, image_patches=None), 40_000_000_000
    parts, own = divide(vision, (num_patches,), step), layer_work(vision, num_patches)
    count = 1 if parts is None else parts.counts[0]
    largest = -(-num_layers // count)
    assert largest == 1 or largest * own <= step
    assert count == 1 or -(-num_layers // (count - 1)) * own > step  # not more parts than needed


def test_the_default_call_of_a_large_model_on_accelerators_has_one_part() -> None:
    step = largest_step_work("gpu", SchedulerConfig(), 1_700_000_000, 1)
    tower = replace(SMOLVLM, hidden_size=1152, intermediate_size=4304, num_layers=27, num_heads=16)
    shape = image_shape(tower, ImagesConfig(), "gpu", 2)
    assert shape.buckets == (1024, 4096)
    assert divide(tower, shape.buckets, step) is None
    assert divide(tower, shape.buckets, step // 8) is not None  # over eight devices, each of which has the whole tower


def test_activations_between_parts_are_counted_for_the_largest_call_that_has_some() -> None:
    shape = image_shape(replace(SMOLVLM, image_patches=None), ImagesConfig(), "cpu", 4)
    assert shape.buckets == (4096,) and shape.activations is None
    divided = replace(shape, parts=divide(SMOLVLM, shape.buckets, 1))
    assert divided.activations == (4096, 768)
    assert divided.num_bytes(4) - shape.num_bytes(4) == 4096 * 768 * 4
