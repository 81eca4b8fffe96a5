"""guidance's model for vLLM: its grammars in Lark's format, and what they capture."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.lane import API_KEY, library
from tests.clients.questions import ANSWER, MODEL, PARIS, QUESTION, Capital
from tests.e2e.http_server import Server

guidance = library("guidance")
vllm = library("guidance.models.experimental")

ASKED = QUESTION[0]["content"]


@pytest.fixture
def asked(smollm2: Server) -> Any:
    """A model after the user's turn; guidance sends no temperature beside a grammar."""
    lm = vllm.VLLMModel(MODEL, base_url=f"{smollm2.url}/v1", api_key=API_KEY, echo=False, sampling_params={"top_k": 1})
    with guidance.user():
        lm += ASKED
    return lm


def test_free_text(asked: Any) -> None:
    with guidance.assistant():
        asked += guidance.gen("text", max_tokens=32)
    assert asked["text"] == ANSWER


def test_choices_patterns_and_schemas_are_captured(asked: Any) -> None:
    with guidance.assistant():
        chosen = asked + guidance.select(["Berlin", "Paris"], name="city")
        pattern = asked + guidance.gen("year", regex="(19|20)[0-9][0-9]")
        schema = asked + guidance.json("capital", schema=Capital)
    assert chosen["city"] in ("Berlin", "Paris")
    assert 1900 <= int(pattern["year"]) < 2100
    assert Capital.model_validate_json(schema["capital"]) == PARIS


def test_texts_and_choices_follow_one_another(asked: Any) -> None:
    @guidance.guidance(stateless=True)
    def sentence(lm: Any) -> Any:
        return lm + "The capital of France is " + guidance.select(["Berlin", "Paris"], name="city") + "."

    with guidance.assistant():
        asked += sentence()
    assert str(asked).endswith(f"The capital of France is {asked['city']}.")
