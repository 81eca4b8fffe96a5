"""Tools and reasoning over HTTP: exact shapes, with the official client, for replies that the test makes up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers

from jaxserve.frontend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat, choose_output_format
from jaxserve.ipc.messages import AddRequest
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.apis.test_replies import CHAT, EOS, NO_DRAFTS, both, events, ids, play, post_stream
from tests.unit.running_api import TOKENIZERS, Api, running_api

if TYPE_CHECKING:
    import openai

TEMPLATE = """
{%- if tools %}<|im_start|>tools
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for document in documents or [] %}<|im_start|>document
{{ document.text }}<|im_end|>
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}{{ ' ' ~ message.name if message.name }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

CONTROL_TOKENS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<secret>"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
CALLS = (
    'Wait.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
HERMES = OutputFormat(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose markers are control tokens, with a template for tools."""
    folder = tmp_path_factory.mktemp("tooled")
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZERS / "byte_level" / "tokenizer.json"))
    backend.add_special_tokens(CONTROL_TOKENS)
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((TOKENIZERS / "byte_level" / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return load_tokenizer(Path(folder))


@pytest.fixture
async def api(tooled: Tokenizer) -> AsyncIterator[Api]:
    async with running_api(tooled, output_format=HERMES, max_model_len=2000) as running:
        yield running


@pytest.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai  # here, so that workers with other files need not import its hundreds of modules

    url = f"http://127.0.0.1:{api.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as opened:
        yield opened


def spelled(api: Api, text: str) -> list[int]:
    """Control tokens as themselves, everything else byte by byte."""
    found = []
    for token in CONTROL_TOKENS:
        before, marker, after = text.partition(token)
        if marker:
            found.append((len(before), before, marker, after))
    if not found:
        return ids(api, text)
    _, before, marker, after = min(found)
    return [*ids(api, before), *api.tokenizer.encode(marker, add_special_tokens=False), *spelled(api, after)]


def steps(api: Api, text: str, size: int = 1) -> list[list[int]]:
    tokens = spelled(api, text)
    return [tokens[i : i + size] for i in range(0, len(tokens), size)] + [[EOS]]


def folded(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A message put together from the deltas of one choice, checking that they have OpenAI's shapes."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["calls"]):
                assert call["id"].startswith("call_")
                assert call | {"id": ""} == {
                    "index": len(message["calls"]),
                    "id": "",
                    "type": "function",
                    "function": {"name": call["function"]["name"], "arguments": ""},
                }
                message["calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call == {"index": call["index"], "function": {"arguments": call["function"]["arguments"]}}
                assert call["index"] == len(message["calls"]) - 1
                message["calls"][-1]["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_stream_of_calls_adds_up_to_the_plain_reply(api: Api, size: int) -> None:
    plain, chunks = await both(api, CHAT, BODY, steps(api, CALLS, size), finish_reason="stop")
    message = plain["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in message["tool_calls"])
    assert message["content"] == "Wait."
    assert "reasoning" not in message
    streamed = folded(chunks)
    assert streamed["calls"] == [call["function"] for call in message["tool_calls"]]
    assert streamed["content"] == "Wait."
    last = chunks[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert plain["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        ('{"name": "no\\ud83dw", "arguments": {}}', "no\ufffdw", "{}"),
        ('{"name": "now", "arguments": "{\\"zone\\": \\"\\udc1a\\"}"}', "now", '{"zone": "\ufffd"}'),
        ('{"name": "now", "arguments": "{\\"zone\\": \\"\\ud83d\\udc1a\\"}"}', "now", '{"zone": "\U0001f41a"}'),
    ],
)
async def test_half_a_surrogate_pair_in_a_call_is_replaced(api: Api, call: str, name: str, arguments: str) -> None:
    made = steps(api, f"<tool_call>\n{call}\n</tool_call>")
    plain, chunks = await both(api, CHAT, BODY, made, finish_reason="stop")
    assert [each["function"] for each in plain["choices"][0]["message"]["tool_calls"]] == folded(chunks)["calls"]
    assert folded(chunks)["calls"] == [{"name": name, "arguments": arguments}]


async def test_content_is_null_beside_calls_only(api: Api) -> None:
    call = CALLS.removeprefix("Wait.")
    (_, plain), _ = await asyncio.gather(api.post(CHAT, BODY), play(api, steps(api, call), finish_reason="stop"))
    assert plain["choices"][0]["message"]["content"] is None
    (_, plain), _ = await asyncio.gather(api.post(CHAT, BODY), play(api, [[EOS]], finish_reason="stop"))
    assert plain["choices"][0]["message"]["content"] == ""
    assert plain["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_the_first_call_ends_a_reply_whose_calls_are_not_parallel(api: Api, size: int) -> None:
    body = BODY | {"parallel_tool_calls": False}
    plain, chunks = await both(api, CHAT, body, steps(api, CALLS, size)[:-1], finish_reason=None)
    choice = plain["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Wait.", "tool_calls")
    assert folded(chunks)["calls"] == [{"name": "get_weather", "arguments": '{"city": "Paris"}'}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    first = CALLS[: CALLS.index("}}") + 2]
    assert plain["usage"]["completion_tokens"] == len(spelled(api, first)), "generated no further than the call"
    for _ in range(2):
        await api.engine.was_aborted()


async def test_a_second_call_after_a_broken_one_is_not_begun(api: Api) -> None:
    body = BODY | {"parallel_tool_calls": False}
    broken = CALLS.replace('"Paris"}}', "Paris")
    plain, _ = await both(api, CHAT, body, steps(api, broken)[:-1], finish_reason=None)
    assert [call["function"]["name"] for call in plain["choices"][0]["message"]["tool_calls"]] == ["get_weather"]


async def test_text_after_the_first_call_is_dropped_though_a_stop_string_held_it_back(api: Api) -> None:
    """Without the stop string, the reply ends with the call."""
    text = CALLS.replace("</tool_call>\n<", "</tool_call>\nThen\n<")
    held = text[text.index('"}}') : text.index(', "arguments": {}')]
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    body = {"input": "Hi", "tools": tools, "parallel_tool_calls": False, "include": ["message.output_text.logprobs"]}
    for stop in ([], [held + "x"]):
        (_, reply), _ = await asyncio.gather(
            api.post("/v1/responses", body | {"stop": stop}), play(api, steps(api, text), finish_reason="stop")
        )
        message, call = reply["output"]
        assert (message["content"][0]["text"], call["arguments"]) == ("Wait.", '{"city": "Paris"}')
        assert "Then" not in "".join(token["token"] for token in message["content"][0]["logprobs"])


async def test_a_call_cut_by_the_limit_ends_with_length(api: Api) -> None:
    cut = CALLS[: CALLS.index("ris")]
    plain, chunks = await both(api, CHAT, BODY, steps(api, cut)[:-1], finish_reason="length")
    assert plain["choices"][0]["finish_reason"] == "length"
    assert folded(chunks)["calls"] == [{"name": "get_weather", "arguments": '{"city": "Pa'}]


async def test_without_tools_calls_are_not_read_and_control_tokens_stay_hidden(api: Api) -> None:
    body = {"messages": BODY["messages"]}
    text = "<secret>A<tool_call>B</tool_call>"
    for fields in (body, BODY | {"tool_choice": "none"}):
        plain, chunks = await both(api, CHAT, fields, steps(api, text), finish_reason="stop")
        assert plain["choices"][0]["message"]["content"] == "AB"
        assert folded(chunks)["content"] == "AB"
    (_, plain), _ = await asyncio.gather(
        api.post(CHAT, BODY), play(api, steps(api, "<secret>" + CALLS), finish_reason="stop")
    )
    assert plain["choices"][0]["message"]["content"] == "Wait."


async def test_reasoning_is_returned_counted_and_can_be_left_out(api: Api) -> None:
    text = "<think>\nHm\n</think>\n\nYes."
    plain, chunks = await both(api, CHAT, BODY, steps(api, text, 4), finish_reason="stop")
    message = plain["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Hm", "Hm", "Yes.")
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6} | NO_DRAFTS
    assert folded(chunks) == {"content": "Yes.", "reasoning": "Hm", "calls": []}
    body = BODY | {"include_reasoning": False, "stream_options": {"include_usage": True}}
    raw, _ = await asyncio.gather(post_stream(api, CHAT, body), play(api, steps(api, text), finish_reason="stop"))
    assert folded(events(raw)) == {"content": "Yes.", "reasoning": "", "calls": []}
    assert events(raw)[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6} | NO_DRAFTS
    assert all(choice["delta"] for chunk in events(raw)[:-2] for choice in chunk["choices"])


async def play_slowly(api: Api, outputs: list[list[int]]) -> None:
    """Be the engine, with each step heard before the next one."""
    request = await api.engine.added()
    for tokens in outputs:
        await api.engine.is_heard()
        api.engine.output(request, tokens, finish_reason="stop" if tokens == [EOS] else None)


async def test_chunks_say_something_or_carry_log_probabilities(api: Api) -> None:
    text = "<think>\nHm\n</think>\n\nYes."
    body = BODY | {"include_reasoning": False}
    raw, _ = await asyncio.gather(post_stream(api, CHAT, body), play_slowly(api, steps(api, text)))
    said = [choice["delta"] for chunk in events(raw) for choice in chunk["choices"]]
    assert said[1:] == [*({"content": letter} for letter in "Yes."), {}]
    raw, _ = await asyncio.gather(post_stream(api, CHAT, body | {"logprobs": True}), play_slowly(api, steps(api, text)))
    scored = [choice["logprobs"]["content"] for chunk in events(raw)[1:] for choice in chunk["choices"]]
    assert sum(map(len, scored)) == len(steps(api, text))


@pytest.mark.parametrize("text", ["a <tool_cal", "Yes", "Ye", "a\n", "\n"])
async def test_text_that_waited_for_more_is_shown_at_the_end(api: Api, text: str) -> None:
    body = BODY | {"stop": ["Yes!"]}
    plain, chunks = await both(api, CHAT, body, steps(api, text), finish_reason="stop")
    assert plain["choices"][0]["message"]["content"] == text
    assert folded(chunks)["content"] == text


@pytest.mark.parametrize(
    ("arguments", "shown"), [({"a": [1]}, '{"a": [1]}'), ('{"a": ', '"{\\"a\\": "'), ("", "{}"), ("[1]", '"[1]"')]
)
async def test_arguments_of_the_history_are_objects_where_they_can_be(api: Api, arguments: Any, shown: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [*BODY["messages"], {"role": "assistant", "tool_calls": [call]}]
    assert f"<tool_call>now {shown}</tool_call>" in await prompt_for(api, messages=messages)


async def test_log_probabilities_cover_every_token_of_calls(api: Api) -> None:
    body = BODY | {"logprobs": True}
    tokens = steps(api, "<think>a</think>" + CALLS)
    plain, chunks = await both(api, CHAT, body, tokens, finish_reason="stop")
    scored = plain["choices"][0]["logprobs"]["content"]
    assert len(scored) == sum(map(len, tokens)) == plain["usage"]["completion_tokens"]
    streamed = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == scored


async def test_stop_string_ends_a_call(api: Api) -> None:
    plain, chunks = await both(api, CHAT, BODY | {"stop": "ris"}, steps(api, CALLS), finish_reason="stop")
    assert plain["choices"][0]["stop_reason"] == "ris"
    assert folded(chunks)["calls"] == [{"name": "get_weather", "arguments": '{"city": "Pa'}]


async def test_choices_have_calls_of_their_own(api: Api) -> None:
    async def engine() -> None:
        requests = [await api.engine.added(), await api.engine.added()]
        for tokens in steps(api, CALLS, 7):
            for request in requests:
                reason = "stop" if tokens == [EOS] else None
                api.engine.output(request, tokens, finish_reason=reason)

    raw, _ = await asyncio.gather(post_stream(api, CHAT, BODY | {"n": 2}), engine())
    assert folded(events(raw), 0) == folded(events(raw), 1)
    assert len(folded(events(raw))["calls"]) == 2


async def test_official_client_gathers_calls_from_a_stream(api: Api, client: openai.AsyncOpenAI) -> None:
    async def ask() -> Any:
        async with client.chat.completions.stream(
            model="tiny", messages=BODY["messages"], tools=BODY["tools"]
        ) as stream:
            return await stream.get_final_completion()

    final, _ = await asyncio.gather(ask(), play(api, steps(api, CALLS, 2), finish_reason="stop"))
    message = final.choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_weather", '{"city": "Paris"}'),
        ("now", "{}"),
    ]
    assert (message.content, final.choices[0].finish_reason) == ("Wait.", "tool_calls")


async def test_official_client_sends_results_back(api: Api, client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [*BODY["messages"]]
    options: Any = {"model": "tiny", "tools": TOOLS}
    first, _ = await asyncio.gather(
        client.chat.completions.create(messages=messages, **options),
        play(api, steps(api, CALLS), finish_reason="stop"),
    )
    messages.append(first.choices[0].message.to_dict())
    for call in first.choices[0].message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})  # noqa: PERF401
    second, request = await asyncio.gather(
        client.chat.completions.create(messages=messages, **options),
        play(api, steps(api, "Sunny."), finish_reason="stop"),
    )
    assert second.choices[0].message.content == "Sunny."
    prompt = prompt_of(api, request)
    assert (
        '<|im_start|>assistant\nWait.<tool_call>get_weather {"city": "Paris"}</tool_call>'
        "<tool_call>now {}</tool_call><|im_end|>\n<|im_start|>tool get_weather\nok<|im_end|>\n"
        "<|im_start|>tool now\nok<|im_end|>\n<|im_start|>assistant\n"
    ) in prompt
    assert '"name": "get_weather", "description": "The weather"' in prompt


def prompt_of(api: Api, request: AddRequest) -> str:
    return api.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


async def prompt_for(api: Api, **fields: Any) -> str:
    """The prompt that a request becomes."""
    body = {"messages": BODY["messages"]} | fields
    (status, _), request = await asyncio.gather(api.post(CHAT, body), play(api, [[EOS]], finish_reason="stop"))
    assert status == 200
    status, reply = await api.post("/tokenize", {name: value for name, value in body.items() if name != "model"})
    assert (status, reply["tokens"]) == (200, request.prompt_token_ids)
    return prompt_of(api, request)


async def test_what_the_template_gets(api: Api) -> None:
    plain = await prompt_for(api)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert await prompt_for(api, tools=TOOLS, tool_choice="none") == plain
    options = {"mode": "auto", "tools": TOOLS[1:]}
    only_now = await prompt_for(api, tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": options})
    assert only_now == await prompt_for(api, tools=TOOLS[1:])
    assert await prompt_for(api, add_generation_prompt=False) == plain.removesuffix("<|im_start|>assistant\n")
    named = [{"role": "user", "name": "Ann", "content": "Hi"}]
    assert await prompt_for(api, messages=named) == plain.replace("user", "user Ann")
    assert await prompt_for(api, reasoning_effort="high") == plain
    quiet = plain + "<think>\n\n</think>\n\n"
    assert await prompt_for(api, reasoning_effort="none") == quiet
    assert await prompt_for(api, chat_template_kwargs={"enable_thinking": False}) == quiet
    kwargs = {"enable_thinking": False}
    assert await prompt_for(api, reasoning_effort="high", chat_template_kwargs=kwargs) == quiet
    assert await prompt_for(api, documents=[{"text": "Facts."}]) == f"<|im_start|>document\nFacts.<|im_end|>\n{plain}"
    assert "<|im_start|>tools\n[" in await prompt_for(api, tools=TOOLS)
    developer = [{"role": "developer", "content": [{"type": "text", "text": "Be brief"}]}, *BODY["messages"]]
    assert (await prompt_for(api, messages=developer)).startswith("<|im_start|>system\nBe brief<|im_end|>")


async def test_a_closed_thinking_prompt_makes_plain_content(api: Api) -> None:
    body = BODY | {"chat_template_kwargs": {"enable_thinking": False}}
    plain, _ = await both(api, CHAT, body, steps(api, "Yes."), finish_reason="stop")
    assert plain["choices"][0]["message"]["content"] == "Yes."
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0} | NO_DRAFTS


@pytest.mark.parametrize(
    ("begin", "rest", "reasoning", "content"),
    [
        ("Pa", " ris", "", " ris"),
        ("<think>Be", " so</think>\nYes", " so", "Yes"),
        ("<think>x</think>A", " b", "", " b"),
    ],
)
async def test_final_message_is_continued(api: Api, begin: str, rest: str, reasoning: str, content: str) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": begin}]
    body = {"messages": messages, "continue_final_message": True}
    prompt = await prompt_for(api, **body)
    assert prompt.endswith(f"<|im_start|>assistant\n{begin}")
    (_, reply), _ = await asyncio.gather(api.post(CHAT, body), play(api, steps(api, rest), finish_reason="stop"))
    message = reply["choices"][0]["message"]
    assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)


async def test_a_message_that_ends_in_a_call_is_not_continued(api: Api) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": '<tool_call>{"name": "now", "arg'}]
    status, reply = await api.post(CHAT, BODY | {"messages": messages, "continue_final_message": True})
    assert (status, reply["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"documents": [{"text": "x"}]}, "documents"),
    ],
)
async def test_what_the_template_has_no_place_for_is_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": BODY["messages"]} | fields
    for output_format in (HERMES, OutputFormat()):
        async with running_api(tokenizer, output_format=output_format) as plain:
            for path in (CHAT, "/tokenize"):
                status, reply = await plain.post(path, body)
                assert (status, reply["error"]["param"], reply["error"]["code"]) == (
                    400,
                    param,
                    "unsupported_parameter",
                )


async def test_tools_are_refused_without_a_format_of_calls(tooled: Tokenizer) -> None:
    async with running_api(
        tooled, output_format=choose_output_format([TEMPLATE], "none", "auto"), max_model_len=2000
    ) as plain:
        status, reply = await plain.post(CHAT, BODY)
        assert (status, reply["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in reply["error"]["message"]
        (status, _), _ = await asyncio.gather(
            plain.post(CHAT, BODY | {"tool_choice": "none"}), play(plain, [[EOS]], finish_reason="stop")
        )
        assert status == 200
