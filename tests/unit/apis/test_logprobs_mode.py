"""`logprobs_mode` of a request: the server's mode is accepted, another one is refused, by every endpoint."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.unit.apis.test_replies import CHAT, TEXT, play
from tests.unit.running_api import Api

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "x"},
    CHAT: {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
async def test_request_for_another_mode_than_the_servers_is_refused(api: Api, path: str) -> None:
    status, reply = await api.post(path, BODIES[path] | {"logprobs_mode": "processed_logprobs"})
    assert status == 400
    message = (
        "'logprobs_mode': must be raw_logprobs, which this server was started with (--logprobs-mode), got processed"
    )
    assert message in json.dumps(reply)


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_request_for_the_servers_mode_is_served(api: Api, path: str) -> None:
    asking = api.post(path, BODIES[path] | {"logprobs_mode": "raw_logprobs"})
    (status, _), _ = await asyncio.gather(asking, play(api, [[5]]))
    assert status == 200


async def test_unknown_mode_is_refused_with_those_that_exist(api: Api) -> None:
    status, reply = await api.post(TEXT, BODIES[TEXT] | {"logprobs_mode": "raw_logits"})
    assert status == 400
    assert reply["error"]["param"] == "logprobs_mode"
