"""Models that read images, in an engine: tokens of transformers, whatever else runs and however prompts are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxserve.config import ImagesConfig
from jaxserve.model_config.preprocessing.images import FixedSize, PanAndScan
from tests.engine.image_reader import IN_ENGINES, ORDER, Reader, limits
from tests.engine.model_engine import ModelEngine, request
from tests.models.crops import CHOSEN, CROPPED_SIZES
from tests.models.goldens import DATA
from tests.models.pictures import picture

pytestmark = [pytest.mark.slow]

IN_CI = ("qwen3_vl_tiny", "gemma3_vision_tiny")
"""Images of any size with positions in three sections, and images that are alike and seen whole."""


@pytest.fixture(
    scope="module",
    params=[name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in IN_ENGINES],
)
def reader(request: Any) -> Iterator[Reader]:
    engine = ModelEngine(DATA / "vision" / request.param, **limits(request.param))
    yield Reader(engine, request.param)
    engine.executor.close()


def test_tokens_equal_transformers(reader: Reader) -> None:
    for count in ORDER:
        reader.engine.restart()
        assert reader.engine.run([reader.request("a", count)])["a"].token_ids == reader.expected(count)


@pytest.mark.parametrize("reader", ["qwen3_vl_tiny"], indirect=True)
def test_texts_have_the_tokens_of_an_engine_without_the_encoder(reader: Reader) -> None:
    messages = [request("a", list(range(20, 60))), request("b", list(range(60, 40, -1)), seed=5, temperature=0.8)]
    reader.engine.restart()
    texts = reader.engine.run(messages)
    plain = ModelEngine(
        DATA / "vision" / reader.name, max_model_len=256, images=ImagesConfig(limit_mm_per_prompt="image=0")
    )
    assert plain.executor.model_info.images is None
    found = plain.run(messages)
    plain.close()
    assert {name: each.token_ids for name, each in found.items()} == {
        name: each.token_ids for name, each in texts.items()
    }


@pytest.mark.parametrize("reader", ["gemma3_vision_tiny"], indirect=True)
def test_tokens_after_images_with_crops_equal_transformers(reader: Reader) -> None:
    sizes, rule = reader.processor.sizes, PanAndScan(min_crop_size=16, max_crops=4, min_ratio=1.2)
    assert isinstance(sizes, FixedSize)
    processor = dataclasses.replace(reader.processor, sizes=dataclasses.replace(sizes, crops=rule))
    with np.load(DATA / "vision" / reader.name / "crops.npz") as arrays:
        prompt, expected = arrays["ids"].tolist(), arrays["outputs"].tolist()
    images = [picture(*CROPPED_SIZES[index], index) for index in CHOSEN]
    reader.engine.restart()
    message = reader.request_of("a", prompt, images, processor)
    assert len(message.images) == 3 + 1 + 3
    assert reader.engine.run([message, reader.request("b", 1)])["a"].token_ids == expected


def test_neighbours_and_chunks_change_no_token(reader: Reader) -> None:
    text, before = request("text", list(range(20, 60))), reader.engine.executor.compilations()["serving"]
    reader.engine.restart()
    alone = reader.engine.run([text])["text"].token_ids
    messages = [reader.request("one", 1), text, reader.request("three", 3), reader.request("other", 1, seed=3)]
    expected = {"one": reader.expected(1), "text": alone, "three": reader.expected(3), "other": reader.expected(1)}
    info = reader.engine.executor.model_info.images
    few = 7
    if info is not None and info.is_bidirectional:  # the largest image, and a token of 3 replies
        few = 3 + max(image.num_tokens for image in messages[2].images)
    for options in ({}, {"max_num_batched_tokens": few}, {"overlap": False}):
        reader.engine.restart(**options)
        together = reader.engine.run(messages)
        assert {name: each.token_ids for name, each in together.items()} == expected, options
    assert reader.engine.executor.compilations()["serving"] == before


def test_the_same_image_is_a_prefix_hit_and_one_changed_pixel_is_none(reader: Reader) -> None:
    reader.engine.restart()
    cold = reader.engine.run([reader.request("a", 3)])["a"]
    hit = reader.engine.run([reader.request("b", 3)])["b"]
    other = reader.engine.run([reader.request("c", 3, changed=True)])["c"]
    assert cold.num_cached_tokens == 0 and hit.num_cached_tokens >= 16
    assert hit.token_ids == cold.token_ids == reader.expected(3)
    assert other.num_cached_tokens < hit.num_cached_tokens
    reader.engine.restart()
    assert reader.engine.run([reader.request("d", 3, changed=True)])["d"].token_ids == other.token_ids


def test_preempted_requests_encode_again_and_give_the_same_tokens(reader: Reader) -> None:
    messages = [reader.request(str(count) + name, count, max_tokens=100) for name in "ab" for count in ORDER]
    alone = []
    for message in messages[: len(ORDER)]:
        reader.engine.restart()
        alone.append(reader.engine.run([message])[message.request_id].token_ids)
    num_pages = -(-(len(messages[1].prompt_token_ids) + 100) // 16)
    spare = 1 if num_pages > 16 else 6  # the last prompts start late where they have many tokens
    reader.engine.restart(num_blocks=num_pages + spare, enable_prefix_caching=False)
    together = reader.engine.run(messages)
    assert reader.engine.num_preemptions > 0
    assert [together[each.request_id].token_ids for each in messages] == alone * 2
