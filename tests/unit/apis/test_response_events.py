"""The events of a streamed response: OpenAI's order, and for any cut of the reply what the plain response says."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxserve.apis.openai.chat_schema import ContentLogprob
from jaxserve.apis.responses.items import FunctionCallItem, MessageItem, OutputText, ReasoningItem
from jaxserve.apis.responses.output import OutputItems
from jaxserve.apis.responses.reply import ResponseFormatter
from jaxserve.apis.responses.response import ResponseObject
from jaxserve.apis.responses.store import StoredResponse
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.handle import TokenCounts
from jaxserve.frontend.parsers.events import Event
from jaxserve.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.tokenization import tokenization
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.apis.test_replies import EOS, ids, play
from tests.unit.apis.test_response_store import stored
from tests.unit.apis.test_tools import play_slowly
from tests.unit.running_api import TOKENIZERS, Api, running_api

PATH = "/v1/responses"
HERMES = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
REPLY = (
    "<think>\nWhy?\n</think>\n\nA caf\u00e9 \U0001f600.\n<tool_call>\n"
    '{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>\nIt is noon.'
)
BODY: dict[str, Any] = {
    "input": "Hi",
    "tools": [{"type": "function", "name": "now"}],
    "include": ["message.output_text.logprobs"],
}


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    return load_tokenizer(TOKENIZERS / "byte_level", chat_template=template)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The data of every event, whose name is its type."""
    parsed = []
    for part in raw.removesuffix(b"\n\n").split(b"\n\n"):
        name, data = part.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == f"event: {event['type']}".encode()
        parsed.append(event)
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


def grown(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the deltas add up to; every `done` must say the same, and come in its place."""
    output: list[dict[str, Any]] = []
    parts = {"response.output_text": ("text", "message"), "response.reasoning_text": ("text", "reasoning")}
    is_open = False
    for event in events:
        kind, _, what = event["type"].rpartition(".")
        if "output_index" in event:
            assert event["output_index"] == len(output) - (what != "added" or kind == "response.content_part")
        if event["type"] == "response.output_item.added":
            assert not is_open
            is_open = True
            assert event["item"]["status"] == "in_progress"
            output.append(event["item"])
        elif kind == "response.content_part" and what == "added":
            output[-1]["content"].append(event["part"])
        elif kind in parts:
            field, item_type = parts[kind]
            assert output[-1]["type"] == item_type
            part = output[-1]["content"][event["content_index"]]
            if what == "delta":
                part[field] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            else:
                assert event[field] == part[field]
        elif kind == "response.function_call_arguments":
            if what == "delta":
                output[-1]["arguments"] += event["delta"]
            else:
                assert event["arguments"] == output[-1]["arguments"]
        elif kind == "response.content_part":
            assert event["part"] == output[-1]["content"][-1]
        elif event["type"] == "response.output_item.done":
            assert is_open
            is_open = False
            output[-1]["status"] = event["item"]["status"]
            assert event["item"] == output[-1]
        if "item_id" in event:
            assert event["item_id"] == output[-1]["id"]
    assert not is_open
    return output


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    names = ("id", "call_id", "created_at", "completed_at")
    items = [{k: v for k, v in item.items() if k not in names} for item in response["output"]]
    return {k: v for k, v in response.items() if k not in names} | {"output": items}


def cut(tokens: list[int], draw: random.Random) -> list[list[int]]:
    borders = sorted(draw.sample(range(1, len(tokens)), draw.choice([0, 3, 15, len(tokens) - 1])))
    return [tokens[begin:end] for begin, end in zip([0, *borders], [*borders, len(tokens)], strict=True)]


async def streamed(api: Api, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with api.http.post(PATH, json=body | {"stream": True}) as response:
        assert response.status == 200
        return events_of(await response.read())


@pytest.mark.parametrize("seed", range(12))
async def test_any_cut_of_a_reply_gives_the_same_response(with_tools: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    async with running_api(with_tools, max_model_len=1000, output_format=HERMES) as api:
        tokens = ids(api, REPLY)[: draw.choice([20, 60, 1000])]
        reason = "stop" if len(tokens) == len(ids(api, REPLY)) else "length"
        steps = [cut([*tokens, EOS] if reason == "stop" else tokens, draw) for _ in range(2)]
        (status, plain), _ = await asyncio.gather(api.post(PATH, BODY), play(api, steps[0], finish_reason=reason))
        events, _ = await asyncio.gather(streamed(api, BODY), play(api, steps[1], finish_reason=reason))
    assert status == 200
    last = events[-1]
    assert last["type"] == ("response.completed" if reason == "stop" else "response.incomplete")
    assert without_ids(last["response"]) == without_ids(plain)
    assert grown(events) == last["response"]["output"]
    texts = [part for item in plain["output"] if item["type"] == "message" for part in item["content"]]
    assert all(b"".join(bytes(e["bytes"]) for e in p["logprobs"]).strip() == p["text"].encode() for p in texts)
    if reason == "stop":
        assert [part["text"] for part in texts] == ["A caf\u00e9 \U0001f600.", "It is noon."]
        assert [item["type"] for item in plain["output"]] == ["reasoning", "message", "function_call", "message"]


def test_a_logprob_that_comes_with_a_call_belongs_to_the_message_before_it() -> None:
    output = OutputItems(lambda: "call_1", itertools.count())
    entry = ContentLogprob(".\n\n", -1.0, [0x2E, 0x0A, 0x0A], [])
    output.take([Event("content", ".", ".")], [])
    output.take([Event("name", "now", "\n\n<tool_call>now")], [(entry, 1)])
    output.take([Event("arguments", "{}", "{}")], [])
    output.finish("completed")
    message, call = output.items("completed")
    assert isinstance(message, MessageItem) and isinstance(call, FunctionCallItem)
    assert message.content == [OutputText(text=".", logprobs=[entry])]
    assert (call.name, call.arguments) == ("now", "{}")


def test_a_logprob_that_comes_with_reasoning_belongs_to_the_message_before_it() -> None:
    output = OutputItems(lambda: "call_1", itertools.count())
    entry = ContentLogprob(".\n", -1.0, [0x2E, 0x0A], [])
    output.take([Event("content", ".", ".")], [])
    output.take([Event("reasoning", "Why?", "\n<think>Why?")], [(entry, 1)])
    output.finish("completed")
    message, reasoning = output.items("completed")
    assert isinstance(message, MessageItem) and isinstance(reasoning, ReasoningItem)
    assert message.content == [OutputText(text=".", logprobs=[entry])]


@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_a_token_of_text_and_the_space_before_a_call_keeps_the_call(tmp_path: Path, size: int) -> None:
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "byte_level" / "tokenizer.json"))
    backend.add_tokens([".\n\n"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((TOKENIZERS / "byte_level" / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    mixed = load_tokenizer(tmp_path)
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    async with running_api(mixed, max_model_len=1000, output_format=HERMES) as api:
        tokens = [*ids(api, "Wait"), *mixed.encode(".\n\n"), *ids(api, call)]
        steps = [*(tokens[i : i + size] for i in range(0, len(tokens), size)), [EOS]]
        (_, plain), _ = await asyncio.gather(api.post(PATH, BODY), play_slowly(api, steps))
        events, _ = await asyncio.gather(streamed(api, BODY), play_slowly(api, steps))
    assert grown(events) == events[-1]["response"]["output"]
    assert without_ids(events[-1]["response"]) == without_ids(plain)
    message, made = plain["output"]
    assert (message["type"], made["type"], made["arguments"]) == ("message", "function_call", '{"zone": "UTC"}')
    (part,) = message["content"]
    assert part["text"] == "Wait."
    assert [entry["token"] for entry in part["logprobs"]] == ["W", "a", "i", "t", ".\n\n"]


async def test_the_events_of_a_text_are_openais_word_for_word(api: Api) -> None:
    steps = [ids(api, "He"), [*ids(api, "y"), EOS]]
    events, _ = await asyncio.gather(streamed(api, {"input": "Hi"}), play(api, steps, finish_reason="stop"))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = ["output_text.delta"] * kinds.count("output_text.delta")
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", *deltas),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    message_id = events[2]["item"]["id"]
    added, done = events[3], events[-4]
    assert added == {
        "type": "response.content_part.added",
        "item_id": message_id,
        "output_index": 0,
        "content_index": 0,
        "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
        "sequence_number": 3,
    }
    assert (done["text"], done["logprobs"], done["item_id"]) == ("Hey", [], message_id)


async def test_a_reply_of_nothing_is_an_empty_message(api: Api) -> None:
    (_, plain), _ = await asyncio.gather(api.post(PATH, {"input": "Hi"}), play(api, [[EOS]], finish_reason="stop"))
    events, _ = await asyncio.gather(streamed(api, {"input": "Hi"}), play(api, [[EOS]], finish_reason="stop"))
    assert [item["content"][0]["text"] for item in plain["output"]] == [""]
    assert grown(events) == events[-1]["response"]["output"]


async def test_a_failure_in_a_stream_is_its_last_event_and_is_kept(api: Api) -> None:
    async def engine() -> None:
        request = await api.engine.added()
        api.engine.output(request, ids(api, "He"))
        await api.engine.is_heard()
        api.engine.refuse(request, "UnavailableError", "gone")

    events, _ = await asyncio.gather(streamed(api, {"input": "Hi"}), engine())
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "gone"})
    assert [item["content"][0]["text"] for item in failed["output"]] == ["He"]
    async with api.http.get(f"{PATH}/{failed['id']}") as response:
        assert await response.json() == failed


def formatter_that_keeps(kept: list[ResponseObject], tokenizer: Tokenizer) -> ResponseFormatter:
    """A response in progress, with a store that adds its states to `kept`."""
    with tokenization() as tokens:
        tokens.install(tokenizer, OutputFormat())
        return ResponseFormatter(
            stored("resp_1", status="in_progress").response,
            tokens,
            num_top_logprobs=None,
            timing=None,
            keep=lambda response, is_first: kept.append(response),
            forget=lambda response_id: None,
        )


def test_a_client_that_leaves_while_its_reply_is_encoded_leaves_nothing(tokenizer: Tokenizer) -> None:
    kept: list[ResponseObject] = []
    reply = formatter_that_keeps(kept, tokenizer)
    reply.reply([[OutputDelta(0, "Hey", finish_reason="stop")]], TokenCounts(1, 1))
    reply.cancel()
    assert kept == []


async def test_a_response_to_a_large_body_is_stored_on_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_api(tokenizer, max_body_size=64 << 10) as api:
        threads, put = [], api.responses.store.put

        def noted_put(state: StoredResponse) -> None:
            threads.append(threading.current_thread())
            put(state)

        monkeypatch.setattr(api.responses.store, "put", noted_put)
        body = json.dumps({"input": "Hi"}) + " " * (40 << 10)
        sent = api.post(PATH, data=body, headers={"Content-Type": "application/json"})
        (status, response), _ = await asyncio.gather(sent, play(api, [[*ids(api, "Hey"), EOS]], finish_reason="stop"))
        assert (status, response["status"]) == (200, "completed")
        assert threads == [threading.current_thread()]
        async with api.http.get(f"{PATH}/{response['id']}") as kept:
            assert await kept.json() == response


def test_a_client_that_leaves_during_the_last_event_finds_a_completed_response(tokenizer: Tokenizer) -> None:
    kept: list[ResponseObject] = []
    reply = formatter_that_keeps(kept, tokenizer)
    reply.opening()
    reply.chunks(OutputDelta(0, "Hey", finish_reason="stop"), None)
    reply.closing(TokenCounts(1, 1))
    reply.cancel()
    assert [response.status for response in kept] == ["in_progress", "completed"]


async def test_a_failure_before_the_stream_is_an_error_and_nothing_is_kept(api: Api) -> None:
    async def engine() -> None:
        request = await api.engine.added()
        api.engine.refuse(request, "ContextLengthError", "too long", param="input")

    (status, reply), _ = await asyncio.gather(api.post(PATH, {"input": "Hi", "stream": True}), engine())
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert len(api.responses.store) == 0


async def test_a_client_that_hangs_up_aborts_the_request_and_leaves_a_cancelled_response(api: Api) -> None:
    response, request = await asyncio.gather(
        api.http.post(PATH, json={"input": "Hi", "stream": True}), play(api, [ids(api, "He")], finish_reason=None)
    )
    async with response:
        created = events_of(await response.content.readuntil(b"\n\n"))[0]["response"]
        response.close()
    assert await api.engine.was_aborted() == request.request_id
    async with api.http.get(f"{PATH}/{created['id']}") as kept:
        cancelled = await kept.json()
    assert (cancelled["status"], cancelled["output"][0]["status"]) == ("cancelled", "incomplete")
    assert cancelled["output"][0]["content"][0]["text"] == "He"
