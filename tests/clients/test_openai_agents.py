"""openai-agents: texts, objects and tools, by chat completions and by responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.clients.lane import AFTER_RESULTS, API_KEY, library
from tests.clients.questions import ANSWER, MODEL, PARIS, QUESTION, Capital
from tests.e2e.http_server import Server

agents = library("agents")
openai = library("openai")

ASKED = QUESTION[0]["content"]
KINDS = ("OpenAIChatCompletionsModel", "OpenAIResponsesModel")


@pytest.fixture(autouse=True)
def no_tracing() -> None:
    """Send no traces to OpenAI."""
    agents.set_tracing_disabled(True)


@pytest.fixture
async def opened(smollm2: Server, tools: Server) -> AsyncIterator[dict[str, Any]]:
    """A client for the server of each model."""
    clients = {
        name: openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0)
        for name, server in ((MODEL, smollm2), ("tiny", tools))
    }
    yield clients
    for client in clients.values():
        await client.close()


def agent(kind: str, clients: dict[str, Any], name: str = MODEL, **options: Any) -> Any:
    """Return an agent whose replies are greedy and short."""
    model = getattr(agents, kind)(model=name, openai_client=clients[name])
    settings = agents.ModelSettings(
        temperature=0, max_tokens=64 if name == MODEL else None, **options.pop("settings", {})
    )
    return agents.Agent(name="Assistant", model=model, model_settings=settings, **options)


async def streamed(asked: Any, question: str) -> tuple[str, Any]:
    """Return the text of a streamed run's deltas, and its result."""
    run = agents.Runner.run_streamed(asked, question)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    return "".join(deltas), run.final_output


@pytest.mark.parametrize("kind", KINDS)
async def test_plain_and_streamed_text(opened: dict[str, Any], kind: str) -> None:
    asked = agent(kind, opened)
    assert (await agents.Runner.run(asked, ASKED)).final_output == ANSWER
    assert await streamed(asked, ASKED) == (ANSWER, ANSWER)


@pytest.mark.parametrize("kind", KINDS)
async def test_objects(opened: dict[str, Any], kind: str) -> None:
    asked = agent(kind, opened, output_type=Capital)
    assert (await agents.Runner.run(asked, ASKED)).final_output == PARIS
    text, last = await streamed(asked, ASKED)
    assert Capital.model_validate_json(text) == last == PARIS


@agents.function_tool
def get_weather(city: str, note: str) -> str:
    """Get the weather in a city."""
    return f"sunny in {city}, {note}"


@agents.function_tool
def now() -> str:
    """Get the time."""
    return "noon"


@agents.function_tool
def name_capital(capital: Capital) -> str:
    """Name a capital."""
    return f"named {capital.city}"


@pytest.mark.parametrize("kind", KINDS)
async def test_tools_are_called_and_their_results_answered(opened: dict[str, Any], kind: str) -> None:
    asked = agent(kind, opened, "tiny", tools=[get_weather, now])
    run = await agents.Runner.run(asked, "The weather?")
    assert run.final_output == AFTER_RESULTS
    outputs = [item.output for item in run.new_items if item.type == "tool_call_output_item"]
    assert outputs == ['sunny in Paris, café "x"', "noon"]
    text, last = await streamed(asked, "The weather?")
    assert last == AFTER_RESULTS
    assert text.endswith(AFTER_RESULTS)


@pytest.mark.parametrize("kind", KINDS)
async def test_tools_and_objects_together(opened: dict[str, Any], kind: str) -> None:
    num_calls = 0

    def is_first(*_: object) -> bool:
        return num_calls == 0

    @agents.function_tool(is_enabled=is_first)
    def find_capital(country: str) -> str:
        """Find the capital of a country."""
        nonlocal num_calls
        num_calls += 1
        return "Paris"

    asked = agent(kind, opened, tools=[find_capital], output_type=Capital)
    assert isinstance((await agents.Runner.run(asked, ASKED)).final_output, Capital)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_default_model_calls_a_function_that_it_must(opened: dict[str, Any], kind: str) -> None:
    asked = agent(
        kind,
        opened,
        tools=[name_capital],
        settings={"tool_choice": "required"},
        tool_use_behavior="stop_on_first_tool",
    )
    assert (await agents.Runner.run(asked, ASKED)).final_output == "named Paris"
