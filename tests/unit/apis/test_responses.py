"""/v1/responses: what is read of a request, what is refused, and what the events of a stream add up to."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec
import pytest

from jaxserve.apis.responses import endpoint
from jaxserve.apis.responses.input import InputItem, read_input
from jaxserve.apis.responses.items import ReasoningItem, ReasoningText
from jaxserve.apis.responses.to_request import chat_messages, to_request
from jaxserve.frontend.encode import template_messages
from jaxserve.frontend.request import GenerationRequest
from tests.unit.apis.test_replies import EOS, ids, play
from tests.unit.running_api import Api

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "now"}
LOGPROBS = ["message.output_text.logprobs"]


def messages_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it."""
    return template_messages(chat_messages(read_input(msgspec.convert(list(items), list[InputItem]))))


def test_a_string_is_a_message_of_the_user() -> None:
    assert template_messages(chat_messages(read_input("Hi"))) == [{"role": "user", "content": "Hi"}]


def test_roles_and_parts_become_messages() -> None:
    assert messages_of(
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}, {"type": "output_text", "text": "c"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "d"}, {"type": "input_text", "text": "e"}]},
    ) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
    ]


def test_what_a_model_wrote_in_one_turn_is_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"zone": "UTC"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "12:00"}
    text = {"role": "assistant", "content": "It is noon."}
    assert messages_of(reasoning, {"role": "assistant", "content": "Wait."}, call, result, reasoning, text, text) == [
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}],
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "c1", "name": "now"},
        {"role": "assistant", "content": "It is noon.", "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "It is noon."},
    ]


def test_a_turn_of_many_items_is_joined_once() -> None:
    """Joined one by one, they would take a time that grows with the square of their number."""

    def seconds(num_items: int) -> float:
        reasoning = [ReasoningItem(id="r", content=[ReasoningText(text)]) for _ in range(num_items)]
        times = []
        for _ in range(3):
            start_s = time.thread_time()
            (message,) = chat_messages(reasoning)
            times.append(time.thread_time() - start_s)
            assert message.reasoning is not None and len(message.reasoning) == num_items * (len(text) + 1) - 1
        return min(times)

    text = "x" * 400
    assert seconds(4000) < 20 * seconds(500), "8 times as many items"


def image(kind: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": kind, "image_url": "http://x"}]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        *(({name: 1}, name) for name in ("max_tokens", "messages", "n", "logprobs", "response_format")),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1000}, "input"),
        ({"input": "x" * 1000}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"stream_options": {}}, "stream_options"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL | {"name": "x"}]},
            },
            "tool_choice",
        ),
        (image("input_image"), "input[0].content[0].image_url"),
        (image("input_file"), "input[0].content[0].type"),
        ({"input": [image("input_image")["input"][0] | {"role": "system"}]}, "input[0].content[0].type"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "x",
                        "output": [image("input_image")["input"][0]["content"][0]],
                    }
                ]
            },
            "input[0].output[0].image_url",
        ),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_its_name(api: Api, fields: dict[str, Any], param: str) -> None:
    status, reply = await api.post(PATH, {"input": "Hi"} | fields)
    assert (status, reply["error"]["param"]) == (400, param), reply
    assert param == "messages" or "messages" not in reply["error"]["message"].replace("--max-messages", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "disabled", "store": True, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"},
        {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "conversation": None},
        {"max_tool_calls": 3, "service_tier": "auto", "prompt_cache_options": {"mode": "implicit"}},
        {"temperature": 0.5, "top_p": 0.25, "metadata": {"a": "b"}, "text": {"verbosity": "low"}},
        {"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False, "instructions": "Be brief."},
    ],
)
async def test_settings_are_echoed(api: Api, fields: dict[str, Any]) -> None:
    steps = [ids(api, "Hey"), [EOS]]
    (status, reply), _ = await asyncio.gather(
        api.post(PATH, {"input": "Hi"} | fields), play(api, steps, finish_reason="stop")
    )
    assert status == 200
    hints = ("conversation", "prompt_cache_options", "include", "service_tier", "reasoning")
    for name in fields.keys() - set(hints):
        echo, asked = reply[name], fields[name]
        assert echo == (asked if name != "text" else asked | {"format": {"type": "text"}})
    assert reply["output"][0]["content"][0]["text"] == "Hey"


async def test_sampling_options_beyond_openai_reach_the_engine(api: Api) -> None:
    body = {"input": "Hi", "top_k": 5, "min_p": 0.25, "seed": 7, "max_output_tokens": 9, "stop": "zz"}
    _, request = await asyncio.gather(api.post(PATH, body), play(api, [ids(api, "abzzc")], finish_reason="length"))
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.max_tokens) == (5, 0.25, 9)


async def test_log_probabilities_are_those_of_the_text(api: Api) -> None:
    body = {"input": "Hi", "include": LOGPROBS, "top_logprobs": 2}
    (_, reply), _ = await asyncio.gather(api.post(PATH, body), play(api, [ids(api, "He"), ids(api, "y")]))
    (part,) = reply["output"][0]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == list("Hey")
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert bytes(part["logprobs"][0]["bytes"]) == b"H"


async def test_every_client_may_read_what_the_start_took(api: Api) -> None:
    body = {"input": "Hi", "return_metrics": True}
    (_, reply), _ = await asyncio.gather(api.post(PATH, body), play(api, [ids(api, "He")]))
    assert reply["metrics"]["total_seconds"] > 0
    async with api.http.get(f"{PATH}/{reply['id']}") as response:
        assert await response.json() == reply


@pytest.mark.parametrize(
    ("query", "texts", "has_more"),
    [
        ("", "dcba", False),
        ("limit=2", "dc", True),
        ("limit=2&after=m_c", "ba", False),
        ("order=asc&limit=1&limit=3&stream=false", "a", True),
        ("order=asc&after=m_d", "", False),
    ],
)
async def test_items_are_listed_page_by_page(api: Api, query: str, texts: str, has_more: bool) -> None:
    items = [{"id": f"m_{text}", "role": "user", "content": text} for text in "abcd"]
    (_, reply), _ = await asyncio.gather(api.post(PATH, {"input": items}), play(api, [[EOS]], finish_reason="stop"))
    async with api.http.get(f"{PATH}/{reply['id']}/input_items?{query}") as response:
        page = await response.json()
    assert [item["content"] for item in page["data"]] == [[{"type": "input_text", "text": text}] for text in texts]
    ids_of_page = [f"m_{text}" for text in texts] or [None]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids_of_page[0], ids_of_page[-1], has_more)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=101", "limit=x", "limit=\u00b2", "order=up", "after=x", "before=x"]
)
async def test_pages_that_do_not_exist_are_refused(api: Api, query: str) -> None:
    (_, reply), _ = await asyncio.gather(api.post(PATH, {"input": "Hi"}), play(api, [[EOS]], finish_reason="stop"))
    async with api.http.get(f"{PATH}/{reply['id']}/input_items?{query}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == query.partition("=")[0]


async def test_listed_tokens_take_the_place_of_the_most_likely(api: Api) -> None:
    body = {"input": "Hi", "include": LOGPROBS, "logprob_token_ids": [5, 6, 7]}
    (_, reply), _ = await asyncio.gather(api.post(PATH, body), play(api, [ids(api, "He")]))
    (part,) = reply["output"][0]["content"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [3, 3]


@pytest.mark.parametrize("query", ["stream=true", "include[]=x", "starting_after=3", "starting_after=0"])
async def test_queries_that_are_not_followed_are_refused(api: Api, query: str) -> None:
    async with api.http.get(f"{PATH}/resp_x?{query}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == query.partition("=")[0].removesuffix("[]")


async def test_the_tokens_of_an_input_are_those_of_the_response_to_it(api: Api) -> None:
    body = {"input": "Hi", "instructions": "Be brief."}
    (_, first), _ = await asyncio.gather(api.post(PATH, body), play(api, [[EOS]], finish_reason="stop"))
    status, counted = await api.post(f"{PATH}/input_tokens", body)
    assert (status, counted) == (
        200,
        {"input_tokens": first["usage"]["input_tokens"], "object": "response.input_tokens"},
    )
    _, longer = await api.post(f"{PATH}/input_tokens", body | {"previous_response_id": first["id"]})
    assert longer["input_tokens"] > counted["input_tokens"]


async def test_a_stored_conversation_is_translated_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be long where the request that continues it is short."""
    threads = []

    def noting(*arguments: Any) -> GenerationRequest:
        threads.append(threading.current_thread())
        return to_request(*arguments)

    monkeypatch.setattr(endpoint, "to_request", noting)
    (_, first), _ = await asyncio.gather(api.post(PATH, {"input": "Hi"}), play(api, [[EOS]], finish_reason="stop"))
    more = {"input": "More", "previous_response_id": first["id"]}
    await asyncio.gather(api.post(PATH, more), play(api, [[EOS]], finish_reason="stop"))
    assert (await api.post(f"{PATH}/input_tokens", more))[0] == 200
    assert [thread is threading.current_thread() for thread in threads] == [True, False, False]


@pytest.mark.parametrize(("change", "param"), [({"max_tokens": 3}, "max_tokens"), ({"model": "other"}, "model")])
async def test_counting_refuses_what_a_response_refuses(api: Api, change: dict[str, Any], param: str) -> None:
    status, reply = await api.post(f"{PATH}/input_tokens", {"input": "Hi"} | change)
    assert status in (400, 404) and reply["error"]["param"] == param
