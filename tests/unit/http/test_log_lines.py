"""Prompts and replies are in no line of the log, at any level, whatever happens to their requests."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from aiohttp import ClientSession
from yarl import URL

from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import MAX_MODEL_LEN, Api, running_api

SECRET = "xyzzy"
CHAT = "/v1/chat/completions"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


async def reply_with(api: Api, text: str, **ends: Any) -> None:
    """Let the engine reply to the next request with a text."""
    request = await api.engine.added()
    api.engine.output(request, api.tokenizer.encode(text, False), **ends)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, chat(SECRET * MAX_MODEL_LEN), 400),
        (CHAT, chat(SECRET, n=0), 400),
        (CHAT, chat(SECRET, temperature="hot"), 400),
        (CHAT, {"messages": [{"role": "user", "content": {"text": SECRET}}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": [SECRET]}]}]}, 400),
        (CHAT, {"messages": SECRET}, 400),
        (CHAT, chat(SECRET, chat_template=SECRET), 400),
        (CHAT, chat(SECRET, response_format={"type": "json_schema", "json_schema": {"schema": SECRET}}), 400),
        ("/v1/completions", {"prompt": {"text": SECRET}}, 400),
        ("/v1/completions", {"prompt": [SECRET, 3]}, 400),
        ("/v1/completions", {"prompt": SECRET, "n": 9}, 429),
        ("/v1/messages", chat(SECRET), 400),
        ("/v1/responses", {"input": {"text": SECRET}}, 400),
        ("/tokenize", {"prompt": [SECRET]}, 400),
    ],
)
async def test_a_refused_prompt_is_not_in_the_log(
    api: Api, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    assert (await api.post(path, body))[0] == status
    assert "refused: " in caplog.text
    assert SECRET not in caplog.text


async def test_prompts_and_replies_are_in_no_line(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_api(tokenizer) as api:
        for ends, status in (({"finish_reason": "length"}, 200), ({"finish_reason": "error"}, 500)):
            done, _ = await asyncio.gather(api.post(CHAT, chat(SECRET)), reply_with(api, SECRET, **ends))
            assert done[0] == status
        for body in (f'{{"messages": "{SECRET}'.encode(), SECRET.encode()):
            headers = {"Content-Type": "application/json"}
            async with api.http.post(CHAT, data=body, headers=headers) as response:
                assert response.status == 400
    assert "refused: " in caplog.text
    assert SECRET not in caplog.text


async def test_a_path_cannot_forge_fields_of_the_access_log(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_api(tokenizer, logs_access=True) as api:
        url = URL(f"http://127.0.0.1:{api.port}/x%20200%200.1%20ms%20id=a%20key=admin", encoded=True)
        async with ClientSession() as http, http.get(url) as response:
            assert response.status == 404
    (line,) = (record.getMessage() for record in caplog.records if record.name == "jaxserve.http.app")
    assert line.startswith("GET /x%20200%200.1%20ms%20id=a%20key=admin 404 ")
