"""LiteLLM, with its providers for OpenAI and for vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.lane import API_KEY, require_lane
from tests.e2e.http_server import Server

require_lane()

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "now")
]


@pytest.fixture(scope="module", params=["openai", "custom_openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, smollm2: Server) -> dict[str, Any]:
    """Arguments of a call, by the provider's name."""
    model = f"{request.param}/SmolLM2-135M-Instruct"
    return {"model": model, "api_base": f"{smollm2.url}/v1", "api_key": API_KEY, "max_retries": 0}


def test_plain_and_streamed_chat(litellm: Any, options: dict[str, Any]) -> None:
    reply = litellm.completion(**options, messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    chunks = list(
        litellm.completion(
            **options, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert whole.choices[0].message.content == ANSWER
    assert whole.usage.completion_tokens == reply.usage.completion_tokens == 8


async def test_async_chat(litellm: Any, options: dict[str, Any]) -> None:
    reply = await litellm.acompletion(**options, messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    stream = await litellm.acompletion(**options, messages=QUESTION, temperature=0, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER


def test_structured_output(litellm: Any, options: dict[str, Any]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    reply = litellm.completion(**options, messages=QUESTION, response_format=schema, max_tokens=30)
    assert json.loads(reply.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_errors_are_litellms_own_classes(litellm: Any, options: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**options | {"model": "openai/gpt-9"}, messages=QUESTION)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**options | {"api_key": "sk-wrong"}, messages=QUESTION)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options, messages=[{"role": "user", "content": "word " * 2000}])


def test_text_completion(litellm: Any, smollm2: Server) -> None:
    options: Any = {"api_base": f"{smollm2.url}/v1", "api_key": API_KEY, "temperature": 0, "max_tokens": 4}
    model = "text-completion-openai/SmolLM2-135M-Instruct"
    reply = litellm.text_completion(model=model, prompt="The capital of France is", **options)
    assert reply.choices[0].text.startswith(" Paris")


def test_responses(litellm: Any, smollm2: Server) -> None:
    options: Any = {"api_base": f"{smollm2.url}/v1", "api_key": API_KEY, "temperature": 0}
    model = "openai/SmolLM2-135M-Instruct"
    reply = litellm.responses(model=model, input=QUESTION[0]["content"], **options)
    assert reply.output_text == ANSWER
    events = litellm.responses(model=model, input=QUESTION[0]["content"], stream=True, **options)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER


def test_tool_calls_whole_and_streamed(litellm: Any, tools: Server) -> None:
    options: Any = {"model": "openai/tiny", "api_base": f"{tools.url}/v1", "api_key": "none", "tools": TOOLS}
    message = litellm.completion(**options, messages=QUESTION).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
    assert message.reasoning_content == "The user wants the weather."
    chunks = list(litellm.completion(**options, messages=QUESTION, stream=True))
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION).choices[0].message
    assert [call.function.arguments for call in whole.tool_calls] == [
        call.function.arguments for call in message.tool_calls
    ]
    assert whole.reasoning_content == message.reasoning_content
