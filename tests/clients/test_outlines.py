"""outlines: every kind of output type, through its model for vLLM and its model for OpenAI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from tests.clients.lane import API_KEY, library
from tests.clients.questions import ANSWER, MODEL, PARIS, QUESTION, Capital
from tests.e2e.http_server import Server

openai = library("openai")
outlines = library("outlines")
types = library("outlines.types")

ASKED = QUESTION[0]["content"]
GREEDY: Any = {"temperature": 0, "max_tokens": 64}


@pytest.fixture(scope="module")
def client(smollm2: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(client: Any) -> Any:
    return outlines.from_vllm(client, MODEL)


def test_plain_and_streamed_text(model: Any) -> None:
    assert model(ASKED, **GREEDY) == ANSWER
    deltas = list(model.stream(ASKED, **GREEDY))
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 2


def test_objects_choices_patterns_and_grammars(model: Any) -> None:
    assert Capital.model_validate_json(model(ASKED, Capital, **GREEDY)) == PARIS
    assert "".join(model.stream(ASKED, Capital, **GREEDY)) == model(ASKED, Capital, **GREEDY)
    assert model(ASKED, Literal["Berlin", "Paris"], **GREEDY) in ("Berlin", "Paris")
    assert model("How many days has a week?", types.Regex("[1-9] days"), **GREEDY).endswith(" days")
    assert model(ASKED, types.CFG('start: "It is " CITY\nCITY: "Rome" | "Paris"'), **GREEDY) == "It is Paris"
    assert int(model("How many days has a week?", int, max_tokens=3, temperature=0)) >= 0


def test_the_model_for_openai(client: Any) -> None:
    model = outlines.from_openai(client, MODEL)
    assert Capital.model_validate_json(model(ASKED, Capital, **GREEDY)) == PARIS
    assert isinstance(json.loads(model("Describe Paris as JSON.", dict, **GREEDY | {"max_tokens": 200})), dict)


async def test_async_objects(smollm2: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as opened:
        model = outlines.from_vllm(opened, MODEL)
        assert Capital.model_validate_json(await model(ASKED, Capital, **GREEDY)) == PARIS
