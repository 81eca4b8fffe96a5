"""Adapters over HTTP: chosen by the name of the model, shown by it, and no other's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.frontend import prepare
from jaxserve.frontend.encode import EncodedRequest, encode_request
from jaxserve.runtime.models.model_runtime import model_names
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import ids, play, post_stream
from tests.unit.running_api import Api, running_api

ADAPTERS = {"sql": "/adapters/sql", "poems": "somebody/poems"}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture
async def adapted(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(tokenizer, adapters=ADAPTERS) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("name", "number", "shown"), [("poems", 2, "poems"), ("sql", 1, "sql"), ("alias", 0, "tiny")])
async def test_a_request_names_its_adapter(adapted: Api, path: str, name: str, number: int, shown: str) -> None:
    body = BODIES[path] | {"model": name}
    (status, reply), request = await asyncio.gather(
        adapted.post(path, body), play(adapted, [ids(adapted, "ok")], finish_reason="stop")
    )
    assert (status, reply["model"], request.adapter) == (200, shown, number)
    async with adapted.http.get("/metrics") as response:
        counted = (
            f'adapter_requests_total{{adapter="{name}",engine="0",model_name="tiny"}} 1.0' in await response.text()
        )
    assert counted == bool(number)


@pytest.mark.parametrize("path", BODIES)
async def test_adapter_that_is_unloaded_while_a_prompt_is_encoded_is_not_replaced_by_the_model(
    adapted: Api, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode_and_unload(*args: Any) -> EncodedRequest:
        encoded = await encode_request(*args)
        adapted.adapters.replace([])
        return encoded

    monkeypatch.setattr(prepare, "encode_request", encode_and_unload)
    status, reply = await asyncio.wait_for(adapted.post(path, BODIES[path] | {"model": "poems"}), 10)
    assert status == 404
    assert "`poems` does not exist" in reply["error"]["message"]


async def test_a_stream_names_it_too(adapted: Api) -> None:
    body = {"model": "poems", "prompt": "Hi"}
    raw, request = await asyncio.gather(
        post_stream(adapted, "/v1/completions", body), play(adapted, [ids(adapted, "ok")], finish_reason="stop")
    )
    assert b'"model":"poems"' in raw
    assert request.adapter == 2


async def test_models_are_listed_with_their_adapters(adapted: Api) -> None:
    async with adapted.http.get("/v1/models") as response:
        cards = {card["id"]: card for card in (await response.json())["data"]}
    assert list(cards) == ["tiny", "alias", "sql", "poems"]
    assert (cards["sql"]["root"], cards["sql"]["parent"]) == ("sql", "tiny"), "the folder stays private"
    assert cards["tiny"]["parent"] is None
    async with adapted.http.get("/v1/models/poems") as response:
        assert (await response.json())["root"] == "somebody/poems"


async def test_the_error_of_an_unknown_name_lists_all_of_them(adapted: Api) -> None:
    status, reply = await adapted.post("/v1/completions", {"model": "prose", "prompt": "Hi"})
    assert status == 404
    assert reply["error"]["message"].endswith("Served here: tiny, alias, sql, poems.")


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        ("sql", "'sql': expected NAME=PATH"),
        ("=path", "expected NAME=PATH"),
        ("sql=", "expected NAME=PATH"),
        ("sql=a,sql=b", "two adapters have the name 'sql'"),
    ],
)
def test_lora_modules_are_names_and_paths(modules: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _ = ModelConfig(model="m", lora_modules=modules).adapters


def test_lora_modules_keep_their_order() -> None:
    config = Config(model=ModelConfig(model="m", lora_modules=" b = x=y , a=z,"))
    assert list(config.model.adapters.items()) == [("b", "x=y"), ("a", "z")]
    assert model_names(config) == ("m",)
