"""Limits of stored responses: number, bytes, time."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from jaxserve.apis.openai.chat_schema import ContentLogprob
from jaxserve.apis.responses import store as store_module
from jaxserve.apis.responses.items import (
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from jaxserve.apis.responses.response import ReasoningEcho, ResponseObject
from jaxserve.apis.responses.schema import TextOptions
from jaxserve.apis.responses.store import KeptResponse, ResponseStore, StoredResponse, encode_stored
from jaxserve.config import ResponsesConfig


def stored(response_id: str, text: str = "x", **fields: object) -> StoredResponse:
    response = ResponseObject(
        id=response_id,
        created_at=1,
        background=False,
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        model="tiny",
        output=[
            ReasoningItem(id="rs_1"),
            MessageItem(id="msg_2", role="assistant", content=[OutputText(text=text)]),
        ],
        parallel_tool_calls=True,
        previous_response_id=None,
        prompt_cache_key=None,
        reasoning=ReasoningEcho(),
        safety_identifier=None,
        store=True,
        temperature=1.0,
        text=TextOptions(),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        user=None,
        metadata={},
    )
    items: list[Item] = [
        MessageItem(id="msg_1", role="user", content=[InputText("Hi")]),
        FunctionCallOutputItem(id="fco_1", call_id="call_1", output=[InputText("ok")]),
    ]
    return StoredResponse(msgspec.structs.replace(response, **fields), items)


def read(store: ResponseStore, response_id: str) -> StoredResponse | None:
    data = store.get(response_id)
    if data is None:
        return None
    kept = msgspec.msgpack.decode(data, type=KeptResponse)
    response = msgspec.json.decode(kept.response, type=ResponseObject)
    assert (kept.id, kept.status, kept.background) == (response_id, response.status, response.background)
    return StoredResponse(response, kept.input_items())


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_was_put_is_found_as_it_was() -> None:
    store = ResponseStore(ResponsesConfig())
    store.put(stored("a"))
    store.put(stored("b", "other"))
    assert read(store, "a") == stored("a")
    assert read(store, "b") == stored("b", "other")
    assert read(store, "c") is None


def test_a_later_state_replaces_the_earlier_one() -> None:
    store = ResponseStore(ResponsesConfig())
    store.put(stored("a", "x" * 1000, status="in_progress"))
    num_bytes = store.num_bytes
    store.put(stored("a", "y", status="completed"))
    assert read(store, "a") == stored("a", "y", status="completed")
    assert len(store) == 1
    assert store.num_bytes < num_bytes - 900


def test_the_least_recently_used_one_goes_first() -> None:
    store = ResponseStore(ResponsesConfig(max_stored_responses=3))
    for name in "abc":
        store.put(stored(name))
    assert store.get("a")
    store.put(stored("d"))
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]


def test_a_response_in_progress_is_open_until_its_end_though_it_was_dropped() -> None:
    clock = Clock()
    store = ResponseStore(ResponsesConfig(max_stored_responses=1, response_ttl=10), clock)
    for name in "ab":
        store.put(stored(name, status="in_progress"))
    clock.now += 11
    assert (store.get("a"), store.get("b")) == (None, None)
    assert store.is_open("a") and store.is_open("b")
    store.put(stored("a", status="completed"))
    assert read(store, "a") is not None
    assert not store.remove("b")
    assert not store.is_open("a") and not store.is_open("b")


def test_bytes_are_bounded_and_the_count_of_them_is_exact() -> None:
    size = len(encode_stored(stored("a", "x" * 100)))
    store = ResponseStore(ResponsesConfig(max_stored_bytes=3 * size))
    for name in "abcd":
        store.put(stored(name, "x" * 100))
    assert [name for name in "abcd" if store.get(name)] == ["b", "c", "d"]
    assert store.num_bytes == 3 * size
    store.put(stored("d", "x" * 4 * size))
    assert [name for name in "bcd" if store.get(name)] == ["b", "c"], "one that is too large drops no other"
    assert store.num_bytes == 2 * size


def test_a_response_is_forgotten_some_time_after_its_last_use() -> None:
    clock = Clock()
    store = ResponseStore(ResponsesConfig(response_ttl=10), clock)
    store.put(stored("a"))
    store.put(stored("b"))
    clock.now += 6
    assert store.get("a")
    clock.now += 6
    assert read(store, "b") is None
    assert store.get("a")
    clock.now += 11
    assert not store.remove("a")
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_of_no_room_keeps_nothing() -> None:
    store = ResponseStore(ResponsesConfig(max_stored_responses=0))
    store.put(stored("a"))
    assert read(store, "a") is None


LARGE = "x" * (1 << 20)


async def test_a_large_response_is_encoded_in_a_thread_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the encoder would keep the event loop busy: 24 ms for the log-probabilities of 16,000 tokens."""
    threads = set[str]()

    def watched(stored_response: StoredResponse) -> bytes:
        threads.add(threading.current_thread().name)
        return encode_stored(stored_response)

    monkeypatch.setattr(store_module, "encode_stored", watched)
    store = ResponseStore(ResponsesConfig())
    store.put(stored("a", LARGE))
    assert len(store) == 0, "it is not stored yet"
    await store.settle("a")
    assert read(store, "a") == stored("a", LARGE)
    assert threading.current_thread().name not in threads


async def test_a_state_that_is_put_or_removed_while_one_is_encoded_is_the_last() -> None:
    store = ResponseStore(ResponsesConfig())
    store.put(stored("a", LARGE))
    store.put(stored("a", LARGE, status="failed"))
    store.put(stored("b", LARGE))
    assert store.remove("b")
    store.put(stored("c", LARGE))
    store.put(stored("c", "short"))
    for name in "abc":
        await store.settle(name)
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))
    assert read(store, "a") == stored("a", LARGE, status="failed")
    assert (read(store, "b"), read(store, "c")) == (None, stored("c", "short"))
    assert store.num_bytes == len(store.get("a") or b"") + len(store.get("c") or b"")


def test_items_of_a_response_are_read_without_its_log_probabilities() -> None:
    """They are most of it, and decoding them all would keep the event loop busy."""
    given = stored("a", "Hey")
    text = given.response.output[1].content[0]  # type: ignore[union-attr]
    assert isinstance(text, OutputText)
    text.logprobs = [ContentLogprob("Hey", -0.5, [72, 101, 121], [])]
    kept = msgspec.msgpack.decode(encode_stored(given), type=KeptResponse)
    assert b'"logprob":-0.5' in kept.response
    text.logprobs = []
    assert kept.items() == [*given.input, *given.response.output]
