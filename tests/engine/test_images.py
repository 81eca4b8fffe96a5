"""Models that read images, in an engine: tokens of transformers, whatever else runs and however prompts are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.config import ImagesConfig
from jaxserve.frontend.images.loader import LoadedImages
from jaxserve.frontend.images.prepared import prepared_item
from jaxserve.frontend.images.processor import process_image
from jaxserve.frontend.images.prompt import prompt_images
from jaxserve.frontend.images.protocol import PreparedImage
from jaxserve.ipc.messages import AddRequest
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import DATA
from tests.models.pictures import picture

SIZES = ((80, 50), (30, 45), (20, 22))
ORDER = {1: (0,), 3: (2, 0, 1)}
"""Pictures of the goldens' prompts, by their number."""

pytestmark = [pytest.mark.slow]


@dataclass
class Reader:
    """An engine and the prompts of its golden."""

    engine: ModelEngine
    name: str

    @property
    def golden(self) -> dict[str, np.ndarray]:
        with np.load(DATA / "vision" / self.name / "golden.npz") as arrays:
            return dict(arrays)

    def request(self, name: str, count: int, *, changed: bool = False, **sampling: Any) -> AddRequest:
        """Return the golden's prompt with `count` pictures, as the API process sends it."""
        config, info = read_image_processor(DATA / "vision" / self.name), self.engine.executor.model_info.images
        assert config is not None and info is not None
        prepared = []
        for index in ORDER[count]:
            image = picture(*SIZES[index], index)
            if changed:
                image.putpixel((5, 5), (1, 2, 3))
            processed = process_image(image, config)
            prepared.append(PreparedImage(list(map(prepared_item, processed.items)), processed.text))
        loaded = LoadedImages(tuple(prepared), config.markup.placeholder, config.image_token_id)
        prompt = self.golden[f"ids_{count}"].tolist()
        images, rope = prompt_images(prompt, loaded, info, "messages")
        return msgspec.structs.replace(request(name, prompt, **sampling), images=images, rope_positions=rope)

    def expected(self, count: int) -> list[int]:
        return self.golden[f"outputs_{count}"].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["smolvlm_tiny", "qwen3_vl_tiny"])
def reader(request: Any) -> Iterator[Reader]:
    engine = ModelEngine(DATA / "vision" / request.param, max_model_len=256)
    yield Reader(engine, request.param)
    engine.executor.close()


def test_tokens_equal_transformers(reader: Reader) -> None:
    for count in ORDER:
        reader.engine.restart()
        assert reader.engine.run([reader.request("a", count)])["a"].token_ids == reader.expected(count)


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


def test_neighbours_and_chunks_change_no_token(reader: Reader) -> None:
    text, before = request("text", list(range(20, 60))), reader.engine.executor.compilations()["serving"]
    reader.engine.restart()
    alone = reader.engine.run([text])["text"].token_ids
    messages = [reader.request("one", 1), text, reader.request("three", 3), reader.request("other", 1, seed=3)]
    expected = {"one": reader.expected(1), "text": alone, "three": reader.expected(3), "other": reader.expected(1)}
    for options in ({}, {"max_num_batched_tokens": 7}, {"overlap": False}):
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


def test_preempted_requests_encode_again_and_give_the_same_tokens(reader: Reader) -> None:
    messages = [reader.request(str(count) + name, count, max_tokens=100) for name in "ab" for count in ORDER]
    alone = []
    for message in messages[: len(ORDER)]:
        reader.engine.restart()
        alone.append(reader.engine.run([message])[message.request_id].token_ids)
    num_pages = -(-(len(messages[1].prompt_token_ids) + 100) // 16)
    reader.engine.restart(num_blocks=num_pages + 6, enable_prefix_caching=False)
    together = reader.engine.run(messages)
    assert reader.engine.num_preemptions > 0
    assert [together[each.request_id].token_ids for each in messages] == alone * 2
