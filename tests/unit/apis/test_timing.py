"""The times of a request are reported if it asks for them, in replies and at the end of streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.running_api import Api

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
}


MESSAGES = "/v1/messages"
ALL = BODIES | {MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}}


async def generate(api: Api, path: str, **fields: Any) -> bytes:
    """Three tokens in two steps, the first after a quarter of a second in the queue."""
    asking = asyncio.create_task(api.http.post(path, json=ALL[path] | fields))
    request = await api.engine.added()
    api.engine.output(request, [70], queue_seconds=0.25)
    await api.engine.is_heard()
    api.engine.output(request, [71, 72], queue_seconds=0.25, finish_reason="length")
    async with await asking as response:
        assert response.status == 200
        return await response.read()


def chunks_of(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().split("\n\n") if line.startswith("data: {")]


def check(timing: dict[str, float]) -> None:
    assert timing["queue_seconds"] == 0.25
    assert 0 < timing["time_to_first_token_seconds"] <= timing["total_seconds"] < 300
    assert timing["tokens_per_second"] >= 2 / timing["total_seconds"]


@pytest.mark.parametrize("path", [*BODIES, MESSAGES])
async def test_a_reply_tells_it_on_request(api: Api, path: str) -> None:
    check(json.loads(await generate(api, path, return_metrics=True))["metrics"])
    assert "metrics" not in json.loads(await generate(api, path))


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_tells_it_in_its_last_chunk(api: Api, path: str, options: dict[str, Any]) -> None:
    *chunks, last = chunks_of(await generate(api, path, return_metrics=True, stream=True, **options))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    check(last["metrics"])
    assert [chunk for chunk in chunks if "metrics" in chunk or not chunk["choices"]] == []


async def test_a_stream_for_anthropics_clients_tells_it_in_its_last_delta(api: Api) -> None:
    body = await generate(api, MESSAGES, return_metrics=True, stream=True)
    *events, end, _ = [json.loads(part.partition("data: ")[2]) for part in body.decode().split("\n\n")[:-1]]
    assert end["type"] == "message_delta"
    check(end["metrics"])
    assert not any("metrics" in event for event in events)


async def test_nothing_generated_took_no_time(api: Api) -> None:
    body = {"prompt": "x", "echo": True, "max_tokens": 0, "return_metrics": True}
    _, reply = await api.post("/v1/completions", body)
    nothing = {"queue_seconds": None, "time_to_first_token_seconds": None, "total_seconds": 0.0}
    nothing |= {"tokens_per_second": None, "weight_version": None, "weight_version_tokens": None}
    nothing |= {"choice_weight_version_tokens": None}
    assert reply["metrics"] == nothing


async def test_the_versions_of_each_choices_tokens_are_reported(api: Api) -> None:
    body = BODIES["/v1/completions"] | {"n": 2, "return_metrics": True}
    asking = asyncio.create_task(api.post("/v1/completions", body))
    first, second = [await api.engine.added() for _ in range(2)]
    api.engine.output(first, [70, 71], weight_version=3)
    api.engine.output(second, [70], weight_version=3)
    await api.engine.is_heard()
    api.engine.output(first, [72], weight_version=4, finish_reason="length")
    api.engine.output(second, [71, 72], weight_version=5, finish_reason="length")
    _, reply = await asking
    assert reply["metrics"]["weight_version"] == 5
    assert reply["metrics"]["weight_version_tokens"] == {"3": 3, "4": 1, "5": 2}
    assert reply["metrics"]["choice_weight_version_tokens"] == [{"3": 2, "4": 1}, {"3": 1, "5": 2}]


async def test_tokens_after_a_stop_string_have_no_version(api: Api) -> None:
    token_ids = api.tokenizer.encode("one two three four", add_special_tokens=False)
    body = BODIES["/v1/completions"] | {"max_tokens": len(token_ids), "stop": "two", "return_metrics": True}
    asking = asyncio.create_task(api.post("/v1/completions", body))
    api.engine.output(await api.engine.added(), token_ids, weight_version=3)
    _, reply = await asking
    num_tokens = reply["usage"]["completion_tokens"]
    assert 0 < num_tokens < len(token_ids)
    assert reply["metrics"]["weight_version_tokens"] == {"3": num_tokens}
