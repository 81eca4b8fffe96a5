"""Anthropic's messages over HTTP: exact shapes of replies, events, refusals, and the prompts that requests become."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings

from jaxserve.apis.anthropic.blocks import BlockEvents, blocks_of
from jaxserve.apis.anthropic.reply import BlockDelta, BlockEvent, BlockStart, BlockStop
from jaxserve.frontend.parsers.events import merged
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import EOS, ids, play
from tests.unit.apis.test_tools import CALLS, HERMES, play_slowly, prompt_of, steps, tooled
from tests.unit.frontend.parsers.reading import events_of
from tests.unit.frontend.parsers.test_any_chunking import cut_replies
from tests.unit.running_api import Api, running_api

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "The weather", "input_schema": SCHEMA},
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]
REPLY = "<think>\nHm\n</think>\n\n" + CALLS
__all__ = ["tooled"]


@pytest.fixture
async def api(tooled: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(tooled, output_format=HERMES, max_model_len=2000) as running:
        yield running


async def post_stream(api: Api, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    async with api.http.post(PATH, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = (await response.read()).decode()
    assert raw.endswith("\n\n")
    events = []
    for part in raw.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def plain_reply(api: Api, body: dict[str, Any], tokens: list[list[int]], **fields: Any) -> dict[str, Any]:
    (status, reply), _ = await asyncio.gather(api.post(PATH, body), play(api, tokens, **fields))
    assert status == 200, reply
    return dict(reply)


async def both(
    api: Api, body: dict[str, Any], tokens: list[list[int]], **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plain reply, and the events of the stream that say the same."""
    plain = await plain_reply(api, body, tokens, **fields)
    events, _ = await asyncio.gather(post_stream(api, body), play(api, tokens, **fields))
    assert content_of(folded(events)) == content_of(plain)
    return plain, events


def content_of(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its random ids."""
    content = [block | {"id": ""} if "id" in block else block for block in message["content"]]
    return message | {"id": "", "content": content}


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to, checking the order of its events."""
    start, ping, *middle, end, stop = events
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert message["usage"]["output_tokens"] == 0
    message["content"] = folded_blocks(middle)
    assert end.keys() == {"type", "delta", "usage"}
    return dict(message | end["delta"] | {"usage": end["usage"]})


def folded_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    is_open, written = False, ""
    for event in events:
        assert event["index"] == len(blocks) - is_open
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
            is_open, written = True, ""
            continue
        assert is_open
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(written or "{}")
            continue
        kind, *rest = event["delta"]
        text = event["delta"][rest[0]]
        assert kind == "type"
        if event["delta"]["type"] == "input_json_delta":
            assert (rest, block["input"]) == (["partial_json"], {})
            written += text
        else:
            assert event["delta"]["type"] == f"{rest[0]}_delta"
            block[rest[0]] += text
    assert not is_open
    return blocks


async def test_reply_and_stream_have_anthropics_shapes(api: Api) -> None:
    plain, events = await both(api, BODY, [*steps(api, "Hey")[:-1], [EOS]], finish_reason="stop")
    assert plain.pop("id").startswith("msg_")
    usage = plain.pop("usage")
    assert plain == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hey"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage == {
        "input_tokens": usage["input_tokens"],
        "cache_read_input_tokens": 0,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 0},
        "cache_creation_input_tokens": 0,
    }
    status, counted = await api.post(COUNT, {"messages": BODY["messages"]})
    assert (status, counted) == (200, {"input_tokens": usage["input_tokens"]})
    assert events[0]["message"]["usage"]["input_tokens"] == usage["input_tokens"]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_thinking_text_and_calls_are_blocks(api: Api, size: int) -> None:
    body = BODY | {"tools": TOOLS}
    plain, events = await both(api, body, steps(api, REPLY, size), finish_reason="stop")
    signature = hashlib.sha256(b"Hm").hexdigest()
    thinking, text, weather, now = plain["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm", "signature": signature}
    assert text == {"type": "text", "text": "Wait."}
    assert weather == {"type": "tool_use", "id": weather["id"], "name": "get_weather", "input": {"city": "Paris"}}
    assert now == {"type": "tool_use", "id": now["id"], "name": "now", "input": {}}
    assert weather["id"] != now["id"]
    assert plain["stop_reason"] == "tool_use"
    assert plain["usage"]["output_tokens_details"]["thinking_tokens"] == 6
    signed = [event for event in events if event.get("delta", {}).get("type") == "signature_delta"]
    assert [event["delta"]["signature"] for event in signed] == [signature]


async def test_thinking_may_be_kept_back(api: Api) -> None:
    body = BODY | {"tools": TOOLS, "thinking": {"type": "adaptive", "display": "omitted"}}
    plain, events = await both(api, body, steps(api, REPLY), finish_reason="stop")
    signature = hashlib.sha256(b"Hm").hexdigest()
    assert plain["content"][0] == {"type": "thinking", "thinking": "", "signature": signature}
    assert not any(event.get("delta", {}).get("type") == "thinking_delta" for event in events)


async def test_only_one_call_when_parallel_use_is_disabled(api: Api) -> None:
    body = BODY | {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    plain, _ = await both(api, body, steps(api, CALLS)[:-1], finish_reason=None)
    assert [block["type"] for block in plain["content"]] == ["text", "tool_use"]
    assert plain["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("text", "fields", "end", "stop_reason", "stop_sequence"),
    [
        ("Yes", {}, "stop", "end_turn", None),
        ("Yes", {}, "length", "max_tokens", None),
        ("Yes", {"max_tokens": 30_000}, "length", "model_context_window_exceeded", None),
        ("Yes!", {"stop_sequences": ["no", "s!"]}, "stop", "stop_sequence", "s!"),
        ("Yes!", {"stop_sequences": ["no"], "stop": "s!"}, "stop", "stop_sequence", "s!"),
        (CALLS, {"tools": TOOLS}, "stop", "tool_use", None),
        (CALLS, {"tools": TOOLS, "stop_sequences": ["ris"]}, "stop", "stop_sequence", "ris"),
        (CALLS, {"tools": TOOLS}, "length", "max_tokens", None),
    ],
)
async def test_reasons_to_stop(
    api: Api, text: str, fields: dict[str, Any], end: str, stop_reason: str, stop_sequence: str | None
) -> None:
    plain = await plain_reply(api, BODY | fields, steps(api, text)[: None if end == "stop" else -1], finish_reason=end)
    assert (plain["stop_reason"], plain["stop_sequence"]) == (stop_reason, stop_sequence)


async def test_a_call_that_is_no_json_keeps_its_text(api: Api) -> None:
    cut = CALLS[: CALLS.index("ris")]
    plain = await plain_reply(api, BODY | {"tools": TOOLS}, steps(api, cut)[:-1], finish_reason="length")
    assert plain["content"][-1]["input"] == {"INVALID_JSON": '{"city": "Pa'}


async def test_an_empty_reply_has_no_blocks(api: Api) -> None:
    plain, _ = await both(api, BODY, [[EOS]], finish_reason="stop")
    assert (plain["content"], plain["stop_reason"]) == ([], "end_turn")


async def test_a_limit_of_no_tokens_computes_the_prompt_alone(api: Api) -> None:
    plain, _ = await both(api, BODY | {"max_tokens": 0}, [ids(api, "x")], finish_reason="length")
    assert (plain["content"], plain["stop_reason"]) == ([], "max_tokens")
    assert (plain["usage"]["output_tokens"], plain["usage"]["input_tokens"] > 0) == (0, True)


async def test_cached_tokens_are_counted_apart(api: Api) -> None:
    tokens = steps(api, "Yes")
    _, counted = await api.post(COUNT, {"messages": BODY["messages"]})
    plain, events = await both(api, BODY, [*tokens[:-1], [EOS]], finish_reason="stop", num_cached_tokens=5)
    for usage in (plain["usage"], events[-2]["usage"]):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (counted["input_tokens"] - 5, 5)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cut_replies())
def test_any_cutting_gives_the_same_blocks(case: tuple[OutputFormat, str, list[str], str]) -> None:
    spoken, prompt_end, pieces, text = case

    def spelled(cut: list[str]) -> list[BlockEvent]:
        numbers = iter(range(1000))
        blocks = BlockEvents(lambda: f"call_{next(numbers)}", shows_thinking=True)
        found = events_of(spoken, cut, prompt_end)
        return [*blocks.of(merged(found) if len(cut) == 1 else found), *blocks.end()]

    whole = blocks_of(spelled([text]))
    for cut in (pieces, list(text)):
        stream = spelled(cut)
        assert blocks_of(stream) == whole
        starts = [event.index for event in stream if isinstance(event, BlockStart)]
        assert starts == [event.index for event in stream if isinstance(event, BlockStop)] == list(range(len(whole)))
        assert all(isinstance(event, BlockDelta | BlockStart | BlockStop) for event in stream)
        assert [event.index for event in stream] == sorted(event.index for event in stream)


async def prompt_for(api: Api, **fields: Any) -> str:
    """The prompt that a request becomes; its tokens are counted alike."""
    body = BODY | fields
    (status, reply), request = await asyncio.gather(api.post(PATH, body), play(api, [[EOS]], finish_reason="stop"))
    assert status == 200, reply
    del body["max_tokens"]
    assert await api.post(COUNT, body) == (200, {"input_tokens": len(request.prompt_token_ids)})
    return prompt_of(api, request)


async def test_what_the_template_gets(api: Api) -> None:
    plain = await prompt_for(api)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}
    for system in ("A", [text]):
        assert await prompt_for(api, system=system) == "<|im_start|>system\nA<|im_end|>\n" + plain
    assert "<|im_start|>user\nA\nA\nHi<|im_end|>" in await prompt_for(
        api, messages=[{"role": "user", "content": [text, text]}, *BODY["messages"]]
    )
    assert "<|im_start|>system\nA<|im_end|>" in await prompt_for(
        api, messages=[*BODY["messages"], {"role": "system", "content": [text]}]
    )
    assert '"name": "get_weather", "description": "The weather"' in await prompt_for(api, tools=TOOLS)
    assert await prompt_for(api, tools=TOOLS, tool_choice={"type": "none"}) == plain
    quiet = plain + "<think>\n\n</think>\n\n"
    assert await prompt_for(api, thinking={"type": "disabled"}) == quiet
    assert await prompt_for(api, thinking={"type": "adaptive"}) == plain
    assert await prompt_for(api, thinking={"type": "enabled"}) == plain
    assert await prompt_for(api, chat_template_kwargs={"enable_thinking": False}) == quiet


async def test_calls_and_results_go_to_the_template(api: Api) -> None:
    use = {"type": "tool_use", "id": "a", "name": "now", "input": {"x": [1]}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "Wait."}, use, use | {"id": "b"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "noon"},
                {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "?"}], "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]  # fmt: skip
    call = '<tool_call>now {"x": [1]}</tool_call>'
    assert (await prompt_for(api, messages=turns, tools=TOOLS)).endswith(
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWait.{call}{call}<|im_end|>\n"
        "<|im_start|>tool now\nnoon<|im_end|>\n<|im_start|>tool now\nError:\n?<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_final_assistant_turn_is_continued(api: Api) -> None:
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "x"}
    text = {"type": "text", "text": "Pa"}
    for content in ("Pa", [thinking, text]):
        messages = [*BODY["messages"], {"role": "assistant", "content": content}]
        assert (await prompt_for(api, messages=messages)).endswith("<|im_start|>assistant\nPa")
    plain = await plain_reply(api, BODY | {"messages": messages}, steps(api, "ris"), finish_reason="stop")
    assert [block["text"] for block in plain["content"]] == ["ris"]


async def test_options_reach_the_engine(api: Api) -> None:
    sampler = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5, "seed": 3}
    body = BODY | sampler | {"stop_token_ids": [9], "priority": 2, "cache_salt": "s", "metadata": {"user_id": "u"}}
    _, request = await asyncio.gather(api.post(PATH, body), play(api, [[EOS]], finish_reason="stop"))
    assert {name: getattr(request.sampling, name) for name in sampler} == sampler
    assert (request.sampling.max_tokens, request.sampling.stop_token_ids) == (400, [9])
    assert (request.priority, request.cache_salt) == (2, "s")


def turns(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        (turns(IMAGE), "messages[0].content[0].source"),
        (turns({"type": "document"}), "messages[0].content[0].type"),
        (turns({"type": "tool_use", "id": "a", "name": "now", "input": {}}), "messages[0].content[0]"),
        (turns({"type": "tool_result", "tool_use_id": "a"}, "assistant"), "messages[0].content[0]"),
        (turns({"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}), "content[0].content[0].source.url"),
        (turns({"type": "tool_use", "id": "a", "name": "now", "input": {}}, "assistant"), "messages"),
        (
            turns({"type": "document"}),
            "must be one of 'image', 'text', 'thinking', 'tool_result', 'tool_use', got 'document'",
        ),
        (turns(IMAGE | {"source": {"type": "ftp"}}), "must be one of 'base64', 'file', 'url', got 'ftp'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "'tools[0].type' is 'web_search_20250305', which is not supported",
        ),
        ({"tools": [{"name": "now"}]}, "tools[0].input_schema"),
        ({"tools": [TOOLS[0] | {"input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOLS[0] | {"allowed_callers": ["code_execution_20260120"]}]}, "tools[0].allowed_callers"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nope"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "'thinking.budget_tokens'"),
        ({"tools": [TOOLS[0] | {"name": "a b"}]}, "tools[0].name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(api: Api, fields: dict[str, Any], named: str) -> None:
    async with api.http.post(PATH, json=BODY | fields) as response:
        reply = await response.json()
        assert response.status == 400
        assert reply.keys() == {"type", "error", "request_id"}
        assert (reply["type"], reply["error"]["type"]) == ("error", "invalid_request_error")
        assert named in reply["error"]["message"]
        assert reply["request_id"] == response.headers["request-id"] == response.headers["X-Request-Id"]


@pytest.mark.parametrize("kind", ["enabled", "disabled"])
async def test_thinking_that_nothing_can_turn_off_is_refused(tokenizer: Tokenizer, kind: str) -> None:
    for is_able in (True, False):
        async with running_api(tokenizer, output_format=HERMES if is_able else OutputFormat()) as api:
            status, _ = await api.post(COUNT, {"messages": BODY["messages"], "thinking": {"type": kind}})
            assert status == (400 if is_able and kind == "disabled" else 200)


async def test_refusals_have_anthropics_types(api: Api, tokenizer: Tokenizer) -> None:
    async def refusal(api: Api, **options: Any) -> tuple[int, str]:
        async with api.http.post(PATH, **options) as response:
            return response.status, (await response.json())["error"]["type"]

    assert await refusal(api, json=BODY | {"model": "other"}) == (404, "not_found_error")
    assert await refusal(api, json=BODY | {"cache_salt": "x" * 20_000}) == (413, "request_too_large")
    assert await refusal(api, data=b"{", headers={"Content-Type": "application/json"}) == (400, "invalid_request_error")
    async with running_api(tokenizer, api_key="secret") as closed:
        assert await refusal(closed, json=BODY) == (401, "authentication_error")
        headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        assert (await refusal(closed, json=BODY | {"model": "other"}, headers=headers))[0] == 404
    async with running_api(tokenizer, is_local=True) as local:
        assert await refusal(local, json=BODY, headers={"Host": "evil.example"}) == (403, "permission_error")
    async with running_api(tokenizer, is_ready=False) as loading:
        assert await refusal(loading, json=BODY) == (503, "overloaded_error")


async def test_full_queue_and_failures_have_anthropics_types(api: Api) -> None:
    with api.client.admission.places(8):
        status, reply = await api.post(PATH, BODY)
        assert (status, reply["error"]["type"]) == (429, "rate_limit_error")

    async def fail(outputs: list[list[int]]) -> None:
        request = await api.engine.added()
        for tokens in outputs:
            api.engine.output(request, tokens)
            await api.engine.is_heard()
        api.engine.refuse(request, "InternalError", "It broke.")

    (status, reply), _ = await asyncio.gather(api.post(PATH, BODY), fail([]))
    assert (status, reply["error"]) == (500, {"type": "api_error", "message": "It broke."})
    events, _ = await asyncio.gather(post_stream(api, BODY), fail(steps(api, "Yes")[:-1]))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {"type": "api_error", "message": "It broke."}


async def test_unknown_fields_are_named_and_a_slow_stream_pings(tooled: Tokenizer) -> None:
    async with running_api(tooled, output_format=HERMES, max_model_len=2000, keep_alive_s=0.01) as api:
        async with api.http.post(PATH, json=BODY | {"stream": True, "foo": 1}) as response:
            assert response.headers["x-jaxserve-ignored"] == "foo"
            seen = b""
            while seen.count(b"event: ping") < 3:
                seen += await response.content.readany()
            await play_slowly(api, steps(api, "Yes"))
            rest = await response.read()
        assert rest.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
