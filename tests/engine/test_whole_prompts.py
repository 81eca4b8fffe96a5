"""PaliGemma in an engine: its prompts are computed whole, and give the tokens of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.engine.image_reader import Reader, limits
from tests.engine.model_engine import ModelEngine, request
from tests.models.goldens import DATA

pytestmark = [pytest.mark.slow]
NAME = "paligemma_tiny"


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    engine = ModelEngine(DATA / "vision" / NAME, **limits(NAME))
    yield Reader(engine, NAME)
    engine.executor.close()


def test_prompts_beside_others_and_in_small_steps_give_the_tokens_of_transformers(reader: Reader) -> None:
    text, length = request("text", list(range(20, 40))), len(reader.request("a", 1).prompt_token_ids)
    reader.engine.restart()
    alone = reader.engine.run([text])["text"].token_ids
    for options in ({}, {"max_num_batched_tokens": 3 + length}, {"overlap": False}):
        reader.engine.restart(**options)
        found = reader.engine.run(
            [reader.request("a", 1), text, reader.request("b", 1, changed=True), reader.request("c", 1)]
        )
        assert found["a"].token_ids == found["c"].token_ids == reader.expected(1), options
        assert found["text"].token_ids == alone and found["b"].token_ids != alone


def test_pages_of_a_prompt_are_a_hit_for_the_same_prompt_only(reader: Reader) -> None:
    reader.engine.restart()
    first = reader.request("a", 1)
    longer = [*first.prompt_token_ids, 20]
    assert reader.engine.run([first])["a"].num_cached_tokens == 0
    again = reader.engine.run([reader.request("b", 1)])["b"]
    assert again.num_cached_tokens >= 16 and again.token_ids == reader.expected(1)
    other = msgspec.structs.replace(reader.request("c", 1), prompt_token_ids=longer)
    assert reader.engine.run([other])["c"].num_cached_tokens == 0


def test_preempted_requests_see_their_prompts_whole_again(reader: Reader) -> None:
    messages = [reader.request(name, 1, max_tokens=100) for name in "abc"]
    reader.engine.restart()
    alone = reader.engine.run(messages[:1])["a"].token_ids
    reader.engine.restart(
        num_blocks=-(-(len(messages[0].prompt_token_ids) + 100) // 16) + 4, enable_prefix_caching=False
    )
    together = reader.engine.run(messages)
    assert reader.engine.num_preemptions > 0
    assert [together[each.request_id].token_ids for each in messages] == [alone] * 3
