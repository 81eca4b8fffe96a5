"""The official Python SDK's responses, against the default model and a fake one that emits reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.lane import AFTER_RESULTS, API_KEY, library
from tests.clients.questions import ANSWER, MODEL, City
from tests.e2e.http_server import Server

openai = library("openai")

QUESTION = "What is the capital of France?"
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("get_weather", "now")
]


@pytest.fixture(scope="module")
def client(smollm2: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def caller(tools: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tools.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def test_whole_and_streamed_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert (whole.output_text, whole.status) == (ANSWER, "completed")
    assert whole.usage.output_tokens == 8
    assert client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens == whole.usage.input_tokens
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert final.output_text == ANSWER


def test_a_stored_response_is_continued_fetched_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0, instructions="Be brief.")
    second = client.responses.create(
        model=MODEL, input="And of Italy?", temperature=0, previous_response_id=first.id, max_output_tokens=24
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_parse_gives_pydantic_objects(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 64}
    assert isinstance(client.responses.parse(**options, text_format=City).output_parsed, City)


def test_calls_and_reasoning_are_items_and_are_answered(caller: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "tools": TOOLS}
    whole = caller.responses.create(**options, input="The weather?")
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [call.name for call in calls] == ["get_weather", "now"]
    with caller.responses.stream(**options, input="The weather?") as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == "".join(call.arguments for call in calls)
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    conversation: Any = [{"role": "user", "content": "The weather?"}, *whole.output, *results]
    assert caller.responses.create(**options, input=conversation).output_text == AFTER_RESULTS
    assert caller.responses.create(**options, input=results, previous_response_id=whole.id).output_text == AFTER_RESULTS


async def test_async_responses(smollm2: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key=API_KEY, max_retries=0) as client:
        stream = await client.responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER


def test_errors_are_the_sdks_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-9", input=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.responses.create(model=MODEL, input="word " * 2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input=QUESTION, tools=[{"type": "web_search"}])
