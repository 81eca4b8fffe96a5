"""instructor: objects from schemas and from forced calls, whole, partial and several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.lane import API_KEY, library
from tests.clients.questions import MODEL, QUESTION, Capital, City
from tests.e2e.http_server import Server

instructor = library("instructor")
openai = library("openai")

OPTIONS: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 64, "max_retries": 0}


@pytest.fixture(scope="module")
def client(smollm2: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_replies_are_objects_at_the_first_try(client: Any, mode: str) -> None:
    chat = instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions
    capital, reply = chat.create_with_completion(**OPTIONS, response_model=Capital)
    assert capital.city == "Paris"
    assert reply.usage.completion_tokens > 0
    *unfinished, last = chat.create_partial(**OPTIONS, response_model=City)
    assert City.model_validate(last.model_dump())
    assert any(piece.name is None or piece.is_capital is None for piece in unfinished), "fields come one by one"


async def test_async_objects_side_by_side(smollm2: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as opened:
        chat = instructor.from_openai(opened, mode=instructor.Mode.JSON_SCHEMA).chat.completions
        asked = [chat.create(**OPTIONS, response_model=Capital) for _ in range(3)]
        assert [capital.city for capital in await asyncio.gather(*asked)] == ["Paris"] * 3
