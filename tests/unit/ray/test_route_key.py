"""Pages that the ingress computes are those that an engine caches."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxserve.frontend.tokenization import Tokenization
from jaxserve.http.operations.routing import PAGE_KEY_BYTES
from jaxserve.metrics import Metrics
from jaxserve.ray import route_key
from jaxserve.ray.route_key import PageSize, RouteKeys, response_replica
from jaxserve.ray.server_process import STATUS_TIMEOUT_S
from jaxserve.ray.settings import read_arguments
from jaxserve.routing.replica import ReplicaId
from jaxserve.routing.request import page_hashes
from jaxserve.routing.router import Router, make_policy
from jaxserve.tenants import KeyRecord, Tenant
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import TOKENIZER
from tests.loop_clock import LoopClock


async def test_pages_of_texts_tokens_and_conversations() -> None:
    config = read_arguments({"model": str(TOKENIZER)}).config
    tokenizer = load_tokenizer(TOKENIZER)
    text, messages = "A text of several pages. " * 4, [{"role": "user", "content": "Hello! " * 9}]
    chat = tokenizer.encode_chat(messages, add_generation_prompt=True, tools=[], template_variables={})
    expected = {
        "/v1/completions": ({"prompt": text, "max_tokens": 5, "cache_salt": "s"}, tokenizer.encode(text, True), "s"),
        "/v1/chat/completions": ({"messages": messages, "model": "m"}, chat, None),
        "/v1/responses": ({"input": [{"type": "message", **messages[0]}], "cache_salt": "s"}, chat, "s"),
    }
    with ThreadPoolExecutor(1) as threads:
        keys = RouteKeys.load(config, TOKENIZER, Tokenization(threads))
        for path, (body, token_ids, salt) in expected.items():
            key = await keys.of(path, json.dumps(body).encode(), 16)
            pages = page_hashes(np.array(token_ids, np.int32), 16, salt)
            assert key.pages == tuple(page[:PAGE_KEY_BYTES] for page in pages) != ()
            assert key.num_prompt_tokens == len(token_ids)
        for path, body in (
            ("/v1/models", {}),
            ("/v1/completions", {"prompt": 7}),
            ("/v1/completions", {"prompt": [-1]}),
        ):
            key = await keys.of(path, json.dumps(body).encode(), 16)
            assert key.pages == ()


@pytest.mark.parametrize(
    "record",
    [
        KeyRecord(key="k"),
        KeyRecord(key="k", name="a"),
        KeyRecord(key="k", name="a", shares_cache=True),
    ],
)
async def test_pages_have_the_salt_of_the_key(record: KeyRecord) -> None:
    config, token_ids = read_arguments({"model": str(TOKENIZER)}).config, list(range(1, 65))
    tenant = Tenant(record, Metrics("m"))
    with ThreadPoolExecutor(1) as threads:
        keys = RouteKeys.load(config, TOKENIZER, Tokenization(threads))
        for salt in (None, "s"):
            body = json.dumps({"prompt": token_ids, "cache_salt": salt}).encode()
            key = await keys.of("/v1/completions", body, 16, tenant)
            pages = page_hashes(np.array(token_ids, np.int32), 16, tenant.salt(salt))
            assert key.pages == tuple(page[:PAGE_KEY_BYTES] for page in pages) != ()


async def test_text_prefix_finds_the_replica_that_had_a_prompt_with_the_same_beginning() -> None:
    settings = read_arguments({"model": str(TOKENIZER), "routing": "text-prefix"})
    router = Router(make_policy(settings.ray.routing), [ReplicaId("a"), ReplicaId("b")])
    texts = ["One long beginning of a prompt, twice: " * 2, "Another beginning of another prompt. " * 2]
    with ThreadPoolExecutor(1) as threads:
        keys = RouteKeys.load(settings.config, TOKENIZER, Tokenization(threads), settings.ray.routing)

        async def replica_of(prompt: str) -> str:
            key = await keys.of("/v1/completions", json.dumps({"prompt": prompt}).encode(), 16)
            return router.route(key).replica.replica_id

        first, second = [await replica_of(text) for text in texts]
        assert first != second
        assert [await replica_of(f"{text}And more.") for text in (texts[1], texts[0], texts[1])] == [
            second,
            first,
            second,
        ]


def test_requests_that_name_a_response_know_the_replica_that_stores_it() -> None:
    named = f"resp_000{'0a' * 16}"
    body = json.dumps({"previous_response_id": f"{named}a1b2c3d4", "input": "x"}).encode()
    quoted = json.dumps({"input": body.decode()}).encode()
    assert response_replica("/v1/responses", body) == "a1b2c3d4"
    assert response_replica("/v1/responses/input_tokens", body) == "a1b2c3d4"
    assert response_replica(f"/v1/responses/{named}a1b2c3d4/cancel", b"") == "a1b2c3d4"
    for path, content in (
        ("/v1/responses", quoted),
        ("/v1/responses", b"{}"),
        ("/v1/chat/completions", body),
        (f"/v1/responses/{named}", b""),
        ("/v1/responses/resp_1/cancel", b""),
    ):
        assert response_replica(path, content) is None


async def test_the_page_size_is_asked_for_again_since_an_update_may_change_it() -> None:
    answers, now = [None, 16, None, 32], [0.0]

    async def ask() -> int | None:
        return answers.pop(0)

    size = PageSize(ask, lambda: now[0])
    assert [await size.get() for _ in range(3)] == [None, 16, 16], "asked until a replica tells, and then not again"
    now[0] = 61.0
    assert [await size.get() for _ in range(2)] == [16, 16], "the last answer holds while no replica tells"
    now[0] = 122.0
    assert [await size.get() for _ in range(2)] == [32, 32]


async def test_a_replica_that_does_not_report_its_page_size_holds_one_request_back_and_not_for_long() -> None:
    clock, num_asked, reports = LoopClock(), 0, asyncio.Event()

    async def ask() -> int | None:
        nonlocal num_asked
        num_asked += 1
        await reports.wait()
        return 16

    size = PageSize(ask)
    first, second, third = (asyncio.create_task(size.get()) for _ in range(3))
    await clock.advance(0.0)
    assert num_asked == 1
    assert [task.done() for task in (first, second, third)] == [False, True, True]
    await clock.advance(STATUS_TIMEOUT_S)
    assert first.done()
    assert [await first, await second, await third] == [None] * 3
    reports.set()
    assert await size.get() == 16


async def test_large_bodies_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        work = getattr(route_key, name)

        def watched(*args: Any) -> Any:
            on_loop.append((name, threading.current_thread() is threading.main_thread()))
            return work(*args)

        monkeypatch.setattr(route_key, name, watched)

    watch("decode_request")
    watch("page_hashes")
    config = read_arguments({"model": str(TOKENIZER)}).config
    with ThreadPoolExecutor(1) as threads:
        keys = RouteKeys.load(config, TOKENIZER, Tokenization(threads))
        small, large, refused = [
            await keys.of("/v1/completions", json.dumps({"prompt": prompt}).encode(), 16)
            for prompt in ([5] * 64, [5] * 20_000, ["x"] * 100_000)
        ]
    assert (len(small.pages), len(large.pages), refused) == (3, 1249, route_key.NO_PROMPT)
    assert large.pages[:3] == small.pages
    assert on_loop == [
        ("decode_request", True),
        ("page_hashes", True),
        ("decode_request", False),
        ("page_hashes", False),
        ("decode_request", False),
    ]
