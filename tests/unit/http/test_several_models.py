"""Several models of one server: each request reaches the engine of the model that it names, and the server describes all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from jaxserve.ipc.messages import EmbeddingInfo, Ready
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import MODEL_INFO, Api, ScriptedEngine, running_api

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
SERVED = "Served here: tiny, alias, big, vectors."


@pytest.fixture
def big() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def vectors() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def both(tokenizer: Tokenizer, big: ScriptedEngine, vectors: ScriptedEngine) -> AsyncIterator[Api]:
    """The server of `tiny`, of `big` and of `vectors`, which embeds. The last one loads until the test says otherwise."""
    async with running_api(tokenizer, others={"big": big, "vectors": vectors}, has_page=True) as running:
        big.say(Ready(msgspec.structs.replace(MODEL_INFO, max_model_len=48)))
        while (await models_of(running))[2]["max_model_len"] is None:
            pass
        yield running


async def models_of(api: Api) -> list[dict[str, object]]:
    async with api.http.get("v1/models") as response:
        return list((await response.json())["data"])


async def load(api: Api, vectors: ScriptedEngine) -> None:
    """Let the last model become ready."""
    vectors.say(Ready(msgspec.structs.replace(MODEL_INFO, embedding=EmbeddingInfo(2, "mean", normalizes=False))))
    while (await models_of(api))[3]["max_model_len"] is None:
        pass


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", CHAT),
    ],
    ids=["chat", "completions", "responses", "messages"],
)
async def test_every_format_reaches_the_model_that_it_names(
    both: Api, big: ScriptedEngine, path: str, body: dict[str, object]
) -> None:
    for name, engine in (("big", big), ("alias", both.engine)):
        asked = asyncio.create_task(both.post(path, {"model": name, **body}))
        engine.output(await engine.added(), [5], finish_reason="length")
        status, reply = await asked
        assert (status, reply["model"]) == (200, "big" if name == "big" else "tiny")
    status, reply = await both.post(path, {"model": "huge", **body})
    assert status == 404 and SERVED in reply["error"]["message"]


async def test_a_request_without_a_model_gets_the_first(both: Api) -> None:
    asked = asyncio.create_task(both.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}))
    both.engine.output(await both.engine.added(), [5], finish_reason="length")
    assert (await asked)[1]["model"] == "tiny"
    status, reply = await both.post("/tokenize", {"prompt": "Hi"})
    assert (status, reply["max_model_len"]) == (200, MODEL_INFO.max_model_len)
    status, reply = await both.post("/tokenize", {"prompt": "Hi", "model": "big"})
    assert (status, reply["max_model_len"]) == (200, 48)
    async with both.http.get("tokenizer_info?model=big") as response:
        assert (await response.json())["model_max_length"] == 48


async def test_embeddings_are_served_beside_generation(both: Api, vectors: ScriptedEngine) -> None:
    await load(both, vectors)
    asked = asyncio.create_task(both.post("/v1/embeddings", {"model": "vectors", "input": "a"}))
    request = await vectors.added()
    vector = np.array([3.0, 4.0], np.float32).tobytes()
    vectors.output(request, [], finish_reason="stop", vector=vector)
    status, reply = await asked
    assert (status, reply["data"][0]["embedding"], reply["model"]) == (200, [3.0, 4.0], "vectors")
    status, reply = await both.post("/v1/embeddings", {"model": "big", "input": "a"})
    assert (status, reply["error"]["code"]) == (400, "unsupported_task")
    assert "`big` generates text" in reply["error"]["message"]
    status, reply = await both.post("/v1/completions", {"model": "vectors", "prompt": "a"})
    assert (status, reply["error"]["code"]) == (400, "unsupported_task")


async def test_health_names_the_model_that_is_not_served(both: Api, vectors: ScriptedEngine) -> None:
    async with both.http.get("health") as response:
        reply = await response.json()
        assert (response.status, reply["status"], reply["model"]) == (503, "loading", "vectors")
    status, reply = await both.post("/v1/embeddings", {"model": "vectors", "input": "a"})
    assert (status, reply["error"]["message"]) == (503, "The model is loading.")
    await load(both, vectors)
    async with both.http.get("health") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    both.client.fail("it died")
    async with both.http.get("ready") as response:
        assert (response.status, (await response.json())["model"]) == (503, "tiny")
    async with both.http.get("live") as response:
        assert response.status == 200, "two models are served"


async def test_models_are_listed_and_metrics_are_labelled(both: Api, big: ScriptedEngine) -> None:
    assert [(card["id"], card["root"]) for card in await models_of(both)] == [
        ("tiny", "tiny"),
        ("alias", "tiny"),
        ("big", "big"),
        ("vectors", "vectors"),
    ]
    async with both.http.get("v1/models/big") as response:
        assert (await response.json())["max_model_len"] == 48
    async with both.http.get("v1/models/huge") as response:
        assert response.status == 404 and SERVED in (await response.json())["error"]["message"]
    asked = asyncio.create_task(both.post("/v1/completions", {"model": "big", "prompt": "Hi", "max_tokens": 1}))
    big.output(await big.added(), [5], finish_reason="length")
    await asked
    async with both.http.get("metrics") as response:
        lines = (await response.text()).splitlines()
    sample = 'jaxserve:request_success_total{engine="0",finished_reason="length",model_name='
    assert {f'{sample}"big"}} 1.0', f'{sample}"tiny"}} 0.0', f'{sample}"vectors"}} 0.0'} <= set(lines)
    assert sum(line.startswith("# TYPE jaxserve:request_success_total") for line in lines) == 1
    assert sum(line.startswith("jaxserve:http_connections{") for line in lines) == 1, "of the process, not of a model"


async def test_commands_name_their_model(both: Api) -> None:
    status, reply = await both.post("/reset_prefix_cache")
    assert (status, reply["error"]["param"]) == (400, "model")
    assert "?model=NAME in the URL (tiny, big, vectors)" in reply["error"]["message"]
    status, reply = await both.post("/reset_prefix_cache?model=huge")
    assert status == 404 and SERVED in reply["error"]["message"]
    status, reply = await both.post("/reset_prefix_cache?model=vectors")
    assert (status, reply["error"]["message"]) == (503, "The model is loading.")
    status, reply = await both.post("/v1/load_lora_adapter?model=tiny", {"lora_name": "big", "lora_path": "x"})
    assert status == 400 and "'big' is the name of another model of this server" in reply["error"]["message"]


async def test_the_page_shows_the_model_that_is_chosen(both: Api, big: ScriptedEngine) -> None:
    asked = asyncio.create_task(both.post("/v1/completions", {"model": "big", "prompt": "Hi", "max_tokens": 1}))
    big.output(await big.added(), [5], finish_reason="length")
    await asked
    counts = {}
    for name in ("tiny", "big"):
        async with both.http.get(f"ui/state?model={name}") as response:
            counts[name] = json.loads(await response.read())["times"]["time_to_first_token"]["count"]
    assert counts == {"tiny": 0, "big": 1}
