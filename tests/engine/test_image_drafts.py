"""Drafts from the request's text after images: rows of decode steps, and chunks of models with recurrent states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from jaxserve.scheduler.plan import NO_SLOT
from tests.engine.image_reader import SIZES, Reader, limits
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_image_steps import begin_reply, finish, joined, plans_of
from tests.engine.test_speculation import predicting
from tests.models.goldens import DATA
from tests.models.pictures import picture

pytestmark = pytest.mark.slow  # real models
NUM_DRAFTS = 3


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_vl_tiny",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("qwen3_5_moe_vision_odd_tiny", "smolvlm_tiny", "gemma3_vision_tiny")
        ),
    ],
)
def reader(request: Any) -> Iterator[Reader]:
    """Rotary positions in three dimensions as rows, the same as chunks beside gated delta nets, plain ones, and images that are seen whole."""
    path = DATA / "vision" / request.param
    engine = ModelEngine(path, num_speculative_tokens=NUM_DRAFTS, **limits(request.param))
    yield Reader(engine, request.param)
    engine.close()


@pytest.mark.usefixtures("speculates")
def test_drafts_after_images_change_no_token(reader: Reader) -> None:
    """Most of each prediction is right; requests run alone, and one with images beside one without."""
    engine, text = reader.engine, request("text", list(range(20, 60)))
    before = engine.executor.compilations()["serving"]
    engine.restart(max_burst_ms=0.0)
    expected = {"one": reader.expected(1), "three": reader.expected(3), "text": engine.run([text])["text"].token_ids}
    assert engine.num_draft_tokens == 0
    messages = [reader.request("one", 1), reader.request("three", 3), text]
    messages = [predicting(message, expected[message.request_id]) for message in messages]
    for overlap in (True, False):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, max_burst_ms=0.0, overlap=overlap)
        for message in messages:
            assert engine.run([message])[message.request_id].token_ids == expected[message.request_id]
        assert 0.3 < engine.num_accepted_tokens / engine.num_draft_tokens < 1
        together = engine.run(messages[1:])
        assert {name: each.token_ids for name, each in together.items()} == {n: expected[n] for n in ("three", "text")}
    assert engine.executor.compilations()["serving"] == before


@pytest.mark.parametrize("reader", ["qwen3_vl_tiny"], indirect=True)
def test_a_step_with_a_token_of_an_image_has_no_drafts(reader: Reader) -> None:
    """The prompt ends with its image, and its last step computes one token."""
    engine, prompt = reader.engine, reader.golden["ids_1"].tolist()
    token = reader.processor.image_token_id
    prompt = prompt[: len(prompt) - prompt[::-1].index(token)]
    prompt = [*range(30, 30 + (1 - len(prompt)) % 16), *prompt]
    message = reader.request_of("image", prompt, [picture(*SIZES[0], 0)], reader.processor)
    engine.restart(max_burst_ms=0.0)
    expected = engine.run([message])["image"].token_ids
    engine.restart(num_speculative_tokens=NUM_DRAFTS, max_burst_ms=0.0)
    assert engine.run([predicting(message, expected)])["image"].token_ids == expected
    assert engine.num_accepted_tokens


@pytest.mark.parametrize("reader", ["qwen3_vl_tiny"], indirect=True)
def test_drafts_beside_the_only_token_of_text_before_an_image_fail_no_step(
    reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt is cut before an image that is being encoded."""
    engine, prompt = reader.engine, reader.golden["ids_1"].tolist()
    prompt = [30, *prompt[prompt.index(reader.processor.image_token_id) :]]
    image = reader.request_of("image", prompt, [picture(*SIZES[0], 0)], reader.processor)
    text = request("text", list(range(20, 60)), max_tokens=100)
    engine.restart(max_burst_ms=0.0)
    expected = {message.request_id: engine.run([message])[message.request_id].token_ids for message in (image, text)}
    engine.restart(num_speculative_tokens=NUM_DRAFTS, max_burst_ms=0.0)
    plans = plans_of(engine)
    outputs = begin_reply(engine, structs.replace(text, prediction_token_ids=expected[text.request_id]))
    outputs += engine.core.handle(image)
    assert joined(outputs + finish(engine)) == expected
    assert any(plan.next_token_ids is not None and NO_SLOT in plan.slots for plan in plans)
    assert "failed" not in caplog.text
