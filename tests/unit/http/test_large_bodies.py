"""Large bodies are repeated and measured beside the event loop, or refused before JSON is made of them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from jaxserve.apis.schema.encode import encode_in_parts
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend import checks
from jaxserve.frontend.messages import FunctionDefinition, check_functions
from jaxserve.http import handler, sse
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import EOS, play
from tests.unit.running_api import running_api

LONG = "x" * 40_000


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_reply_that_repeats_a_large_body_is_encoded_in_a_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    threads: list[threading.Thread] = []

    def watched(value: Any) -> bytes:
        threads.append(threading.current_thread())
        return encode_in_parts(value)

    monkeypatch.setattr(sse, "encode_in_parts", watched)
    monkeypatch.setattr(handler, "encode_in_parts", watched)
    async with running_api(tokenizer, max_body_size=100_000) as api:

        async def post(user: str) -> str:
            body = {"input": "x", "user": user, "stream": is_streamed}
            async with api.http.post("/v1/responses", json=body) as response:
                assert response.status == 200
                return await response.text()

        for user in (LONG, "x"):
            text, _ = await asyncio.gather(post(user), play(api, [[35, EOS]], finish_reason="stop"))
            assert f'"user":"{user}"' in text
            on_loop = [thread is threading.main_thread() for thread in threads]
            assert on_loop == ([False] * len(threads) if user == LONG else [True] * (not is_streamed))
            assert threads or is_streamed
            threads.clear()


def test_json_of_too_many_characters_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(value: Any) -> bytes:
        raise AssertionError("a text of 4 MB takes 30 ms")

    function = FunctionDefinition(name="f", parameters={"a": {LONG: [LONG] * 100}})
    with monkeypatch.context() as patch:
        patch.setattr(msgspec.json, "encode", encode)
        with pytest.raises(InvalidRequestError, match="max-function-chars"):
            check_functions([function], "tools[{}].function", LimitsConfig())
    assert check_functions([FunctionDefinition(name="f")], "tools[{}].function", LimitsConfig()) == {"f"}
    assert checks.num_chars(function) == len("fa") + 101 * len(LONG)


def test_of_a_long_value_only_the_beginning_is_written() -> None:
    for value in ([1] * 1_000_000, {"a": LONG}, [[LONG]], (1,) * 1_000_000):
        assert len(checks.shorten(value)) == checks.MAX_ECHOED_CHARS + len("...")
    for value in ({"b": 1, "c": [1, "x"]}, [1, 2], "a", 3, None, 1.5, (1, 2, 3, 4, 5, 6, 7, 8)):
        assert checks.shorten(value) == repr(value)
