"""pydantic-ai: agents with texts, objects and tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.lane import AFTER_RESULTS, API_KEY, library
from tests.clients.questions import ANSWER, MODEL, PARIS, QUESTION, Capital
from tests.e2e.http_server import Server

pydantic_ai = library("pydantic_ai")
models = library("pydantic_ai.models.openai")
openai_provider = library("pydantic_ai.providers.openai")

ASKED = QUESTION[0]["content"]
GREEDY: Any = {"temperature": 0, "max_tokens": 64}


@pytest.fixture(scope="module", params=["OpenAIChatModel", "OpenAIResponsesModel"])
def make(request: pytest.FixtureRequest) -> Any:
    """Return a function that makes a model of one of the two APIs."""

    def model(server: Server, name: str = MODEL) -> Any:
        provider = openai_provider.OpenAIProvider(base_url=f"{server.url}/v1", api_key=API_KEY)
        return getattr(models, request.param)(name, provider=provider)

    return model


async def test_plain_and_streamed_text(make: Any, smollm2: Server) -> None:
    agent = pydantic_ai.Agent(make(smollm2), model_settings=GREEDY)
    result = await agent.run(ASKED)
    assert result.output == ANSWER
    async with agent.run_stream(ASKED) as stream:
        deltas = [delta async for delta in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 2


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
async def test_objects_by_a_forced_call_and_by_a_schema(make: Any, smollm2: Server, output: str) -> None:
    form = getattr(pydantic_ai, output)(Capital)
    agent = pydantic_ai.Agent(make(smollm2), output_type=form, model_settings=GREEDY, retries=0)
    assert (await agent.run(ASKED)).output == PARIS
    async with agent.run_stream(ASKED) as stream:
        assert await stream.get_output() == PARIS


async def test_tools_and_a_schema_together(make: Any, smollm2: Server) -> None:
    async def only_once(context: Any, tool: Any) -> Any:
        return tool if context.run_step == 1 else None

    def find_capital(country: str) -> str:
        """Find the capital of a country."""
        return "Paris"

    form = pydantic_ai.NativeOutput(Capital)
    tool = pydantic_ai.Tool(find_capital, prepare=only_once)
    agent = pydantic_ai.Agent(make(smollm2), output_type=form, tools=[tool], model_settings=GREEDY, retries=0)
    assert isinstance((await agent.run(ASKED)).output, Capital)


async def test_tools_are_called_and_their_results_answered(make: Any, tools: Server) -> None:
    seen = []

    def get_weather(city: str, note: str) -> str:
        """Get the weather in a city."""
        seen.append((city, note))
        return "sunny"

    def now() -> str:
        """Get the time."""
        seen.append(("now", ""))
        return "noon"

    agent = pydantic_ai.Agent(make(tools, "tiny"), tools=[get_weather, now])
    assert (await agent.run("The weather?")).output == AFTER_RESULTS
    async with agent.run_stream_events("The weather?") as events:
        *_, last = [event async for event in events]
    assert last.result.output == AFTER_RESULTS
    assert sorted(seen) == sorted([("Paris", 'café "x"'), ("now", "")] * 2)
