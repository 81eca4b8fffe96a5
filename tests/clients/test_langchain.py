"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from tests.clients.lane import AFTER_RESULTS, API_KEY, library
from tests.e2e.http_server import Server

langchain_openai = library("langchain_openai")
messages = library("langchain_core.messages")
openai = library("openai")
pydantic = library("pydantic")

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class City(pydantic.BaseModel):
    """A city."""

    name: str
    continent: Literal["Africa", "America", "Asia", "Europe"]


def get_weather(city: str, note: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}, {note}"


def now() -> str:
    """The time."""
    return "noon"


@pytest.fixture(scope="module")
def model(smollm2: Server) -> Any:
    return langchain_openai.ChatOpenAI(
        model="SmolLM2-135M-Instruct", base_url=f"{smollm2.url}/v1", api_key=API_KEY, temperature=0, max_retries=0
    )


@pytest.fixture(scope="module")
def caller(tools: Server) -> Any:
    chat = langchain_openai.ChatOpenAI(model="tiny", base_url=f"{tools.url}/v1", api_key="none", max_retries=0)
    return chat.bind_tools([get_weather, now])


def test_invoke_and_stream(model: Any) -> None:
    reply = model.invoke([("system", "Be brief."), ("user", QUESTION)])
    assert "Paris" in reply.content
    assert reply.response_metadata["finish_reason"] == "stop"
    chunks = list(model.stream([("system", "Be brief."), ("user", QUESTION)], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == reply.content
    whole = sum(chunks[1:], chunks[0])
    assert whole.usage_metadata["output_tokens"] == reply.usage_metadata["output_tokens"] > 0


async def test_async_batch_and_stream(model: Any) -> None:
    replies = await model.abatch([QUESTION] * 3)
    assert [reply.content for reply in replies] == [ANSWER] * 3

    async def streamed() -> str:
        return "".join([chunk.content async for chunk in model.astream(QUESTION)])

    assert await asyncio.gather(streamed(), streamed()) == [ANSWER] * 2


def test_bound_tools_are_called_and_answered(caller: Any) -> None:
    question = messages.HumanMessage("The weather?")
    reply = caller.invoke([question])
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [
        ("get_weather", {"city": "Paris", "note": 'café "x"'}),
        ("now", {}),
    ]
    chunks = list(caller.stream([question]))
    whole = sum(chunks[1:], chunks[0])
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(c["name"], c["args"]) for c in reply.tool_calls]
    results = [messages.ToolMessage("noon", tool_call_id=call["id"]) for call in reply.tool_calls]
    assert caller.invoke([question, reply, *results]).content == AFTER_RESULTS


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(model: Any, method: str) -> None:
    prompt = 'Describe Paris as JSON like {"name": "Paris", "continent": "Europe"}.'
    for is_strict in (True, None) if method == "json_schema" else (None,):
        structured = model.bind(max_tokens=64).with_structured_output(City, method=method, strict=is_strict)
        assert isinstance(structured.invoke(prompt), City)
        *_, last = structured.stream(prompt)
        assert isinstance(last, City)


def test_structured_output_by_a_forced_call(tools: Server) -> None:
    chat = langchain_openai.ChatOpenAI(model="tiny", base_url=f"{tools.url}/v1", api_key="none", seed=3, max_tokens=600)
    for is_strict in (True, None):
        structured = chat.with_structured_output(City, method="function_calling", strict=is_strict)
        assert isinstance(structured.invoke(QUESTION), City)


def test_the_responses_api(smollm2: Server, tools: Server) -> None:
    options: Any = {"use_responses_api": True, "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(
        model="SmolLM2-135M-Instruct", base_url=f"{smollm2.url}/v1", api_key=API_KEY, temperature=0, **options
    )
    assert chat.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == ANSWER
    caller = langchain_openai.ChatOpenAI(model="tiny", base_url=f"{tools.url}/v1", api_key="none", **options)
    caller = caller.bind_tools([get_weather, now])
    question = messages.HumanMessage("The weather?")
    reply = caller.invoke([question])
    assert [call["name"] for call in reply.tool_calls] == ["get_weather", "now"]
    results = [messages.ToolMessage("noon", tool_call_id=call["id"]) for call in reply.tool_calls]
    assert caller.invoke([question, reply, *results]).text == AFTER_RESULTS


def test_errors(model: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as too_long:
        model.invoke("word " * 2000)
    assert too_long.value.code == "context_length_exceeded"
