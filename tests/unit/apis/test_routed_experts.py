"""`return_routed_experts`: the experts of the tokens of a choice, the same in streams and plain replies."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from jaxserve.frontend import routed_experts
from jaxserve.frontend.reply_budget import COPIES_OF_EXPERTS
from jaxserve.ipc.messages import AddRequest
from jaxserve.ipc.routed_experts import RoutedExpertsInfo
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import CHAT, TEXT, events, ids, play, post_stream
from tests.unit.running_api import Api, running_api

INFO = RoutedExpertsInfo(num_layers=3, num_per_token=2, num_experts=300)
ASK = {"return_routed_experts": True}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def mixture(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(tokenizer, routed_experts=INFO) as api:
        yield api


def experts(num_tokens: int, first: int = 0) -> np.ndarray:
    """Return other experts for each token, from token number `first` on."""
    numbers = np.arange(first * 6, (first + num_tokens) * 6) % INFO.num_experts
    return numbers.astype(INFO.dtype).reshape(-1, *INFO.shape)


async def answer(api: Api, steps: list[list[int]], finish_reason: str | None = "length") -> AddRequest:
    """Be the engine for one request: the prompt in two chunks, then one output per step, each with its experts."""
    request = await api.engine.added()
    assert request.returns_routed_experts
    num_sent = len(request.prompt_token_ids) // 2
    if num_sent:
        api.engine.output(request, [], routed_experts=experts(num_sent).tobytes())
    num_known = len(request.prompt_token_ids)
    for i, token_ids in enumerate(steps):
        num_known += len(token_ids)
        part = experts(num_known - 1 - num_sent, num_sent).tobytes()
        num_sent = num_known - 1
        end = finish_reason if i == len(steps) - 1 else None
        api.engine.output(request, token_ids, routed_experts=part, finish_reason=end)
    return request


def loaded(choice: dict[str, Any]) -> np.ndarray:
    """Decode the field as a client does."""
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_reply_and_last_chunk_have_the_experts_of_all_computed_tokens(mixture: Api, path: str) -> None:
    steps = [ids(mixture, text) for text in ("one", "t", "wo")]
    body = ASK | ({"prompt": "a cat", "max_tokens": 9} if path == TEXT else {"messages": MESSAGES})
    (status, plain), request = await asyncio.gather(mixture.post(path, body), answer(mixture, steps))
    assert status == 200
    num_tokens = len(request.prompt_token_ids) + sum(map(len, steps)) - 1
    found = loaded(plain["choices"][0])
    assert (found.dtype, found.shape) == (np.uint16, (num_tokens, 3, 2))
    assert np.array_equal(found, experts(num_tokens))
    raw, _ = await asyncio.gather(post_stream(mixture, path, body), answer(mixture, steps))
    choices = [choice for chunk in events(raw) for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if "routed_experts" in choice] == ["length"]
    assert np.array_equal(loaded(choices[-1]), found)


async def test_text_that_a_stop_string_ended_has_the_experts_up_to_it(mixture: Api) -> None:
    """The engine had computed tokens after it."""
    tokens = ids(mixture, "abSTOPcd")
    body = ASK | {"prompt": "xy", "max_tokens": 20, "stop": "STOP"}
    (_, reply), request = await asyncio.gather(
        mixture.post(TEXT, body), answer(mixture, [tokens[:3], tokens[3:]], None)
    )
    num_tokens = len(request.prompt_token_ids) + reply["usage"]["completion_tokens"] - 1
    assert reply["usage"]["completion_tokens"] < len(tokens)
    assert np.array_equal(loaded(reply["choices"][0]), experts(num_tokens))


async def test_every_choice_has_its_own_and_a_prompt_alone_has_those_of_the_prompt(mixture: Api) -> None:
    texts = ("ab", "cde")
    asking = mixture.post(TEXT, ASK | {"prompt": "xy", "n": 2, "max_tokens": 5})
    (_, reply), *_ = await asyncio.gather(asking, *(answer(mixture, [ids(mixture, text)]) for text in texts))
    num_prompt = len(ids(mixture, "xy"))
    found = {choice["text"]: len(loaded(choice)) for choice in reply["choices"]}
    assert found == {text: num_prompt + len(ids(mixture, text)) - 1 for text in texts}
    asking = mixture.post(TEXT, ASK | {"prompt": "xy", "max_tokens": 0, "echo": True})
    (_, reply), _ = await asyncio.gather(asking, answer(mixture, [[7]]))
    assert reply["choices"][0]["text"] == "xy"
    assert np.array_equal(loaded(reply["choices"][0]), experts(num_prompt))


async def test_replies_have_no_experts_unless_asked_for(mixture: Api) -> None:
    for body in ({"prompt": "x"}, {"prompt": "x", "return_routed_experts": False}):
        (_, reply), request = await asyncio.gather(mixture.post(TEXT, body), play(mixture, [[5]]))
        assert not request.returns_routed_experts
        assert "routed_experts" not in reply["choices"][0]


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_server_that_returns_none_refuses_the_field_and_names_its_flag(api: Api, path: str) -> None:
    status, reply = await api.post(path, ASK | {"prompt": "x"} if path == TEXT else ASK | {"messages": MESSAGES})
    assert (status, reply["error"]["param"]) == (400, "return_routed_experts")
    assert "--enable-return-routed-experts" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", {"input": "Hi"}), ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4})]
)
async def test_other_endpoints_refuse_the_field(mixture: Api, path: str, body: dict[str, Any]) -> None:
    status, reply = await mixture.post(path, body | ASK)
    assert status == 400
    assert "return_routed_experts" in reply["error"]["message"]


async def test_more_tokens_than_fit_a_message_are_refused(mixture: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_experts, "MAX_BYTES", 10 * INFO.token_bytes)
    status, reply = await mixture.post(TEXT, ASK | {"prompt": [5, 6, 7], "max_tokens": 8})
    assert (status, reply["error"]["param"]) == (400, "return_routed_experts")
    assert "at most 10 tokens, prompt and `max_tokens` are 11" in reply["error"]["message"]


async def test_their_memory_is_reserved(tokenizer: Tokenizer) -> None:
    room = 10 * INFO.token_bytes * COPIES_OF_EXPERTS
    body = ASK | {"prompt": [5, 6, 7], "max_tokens": 4}
    async with running_api(tokenizer, routed_experts=INFO, max_reply_memory=room) as api:
        status, reply = await api.post(TEXT, body | {"max_tokens": 8})
        assert (status, reply["error"]["code"]) == (413, "reply_too_large")
        first = asyncio.create_task(api.post(TEXT, body))
        request = await api.engine.added()
        status, reply = await api.post(TEXT, body)
        assert (status, reply["error"]["code"]) == (429, "rate_limit_exceeded")
        api.engine.output(request, [9], finish_reason="length", routed_experts=experts(3).tobytes())
        assert (await first)[0] == 200
        assert api.replies.num_bytes == 0
