"""Tools and reasoning, whole: flags, template, engine process, API processes, and the official client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import tokenizers
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.e2e.http_server import TOKENIZER, Server, running

EOS, START = 2, 1
REPLY = (
    "<think>\nThe user wants the weather.\n</think>\n\nOne moment.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris", "note": "caf\\u00e9 \\"x\\""}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THOUGHT = "The user wants the weather."
MESSAGES: Any = [{"role": "user", "content": "The weather?"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get_weather", "now")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tokenizer")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    backend = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    backend.add_tokens(["<think>", "</think>"])  # as Qwen3 has them: text, but tokens of their own
    backend.save(str(folder / "tokenizer.json"))
    shutil.copy(TOKENIZER / "tokenizer_config.json", folder)
    tokenizer = load_tokenizer(folder)
    script = [*tokenizer.encode(f"assistant\n{REPLY}", add_special_tokens=False), EOS]
    fake = {"vocab_size": 397, "num_blocks": 2048, "script": {"cue": START, "token_ids": script}}
    model = {"model": str(folder), "served_model_name": "tiny", "chat_template": str(template)}
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "api_processes": 2}
    with running(fake, model=model, server=parsers) as running_server:
        assert "output format: tool calls hermes, reasoning qwen3" in running_server.output
        yield running_server


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    """A connection of its own for each test, so that both API processes are asked."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def check_message(message: Any) -> None:
    assert message.content == "One moment."
    assert message.reasoning == message.reasoning_content == "The user wants the weather."
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
    weather, now = (json.loads(call.function.arguments) for call in message.tool_calls)
    assert (weather, now) == ({"city": "Paris", "note": 'café "x"'}, {})


@pytest.mark.parametrize("attempt", range(4))
def test_plain_and_streamed_replies_have_the_same_calls(client: openai.OpenAI, attempt: int) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
    plain = client.chat.completions.create(**options)
    check_message(plain.choices[0].message)
    assert plain.choices[0].finish_reason == "tool_calls"
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is not None
    assert plain.usage.completion_tokens_details.reasoning_tokens
    assert plain.usage.completion_tokens_details.reasoning_tokens < plain.usage.completion_tokens
    with client.chat.completions.stream(**options) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces).endswith('"caf\\u00e9 \\"x\\""}{}')
    check_message(final.choices[0].message)
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_conversation_goes_on_with_results(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "tools": TOOLS}
    first = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    calls = [call for call in first.tool_calls or () if isinstance(call, ChatCompletionMessageFunctionToolCall)]
    assert len(calls) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
    history: Any = [*MESSAGES, first.to_dict(), *results]
    check_message(client.chat.completions.create(messages=history, **options).choices[0].message)


def test_a_tool_that_is_not_to_be_called_is_not_called(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="none")
    message = reply.choices[0].message
    assert message.tool_calls is None
    assert message.content == REPLY.partition("</think>\n\n")[2]
    assert reply.choices[0].finish_reason == "stop"


NARROW: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"$ref": "#/$defs/unit"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["unit", "days"],
                "additionalProperties": False,
                "$defs": {"unit": {"enum": units}},
            },
        },
    }
    for name, units in (("get_weather", ["C", "F"]), ("now", ["s"]))
]


def check_forced(calls: Any) -> None:
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"unit", "days"}
        assert arguments["unit"] in {"get_weather": "CF", "now": "s"}[call.function.name]
        assert 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_follow_their_schemas_after_the_reasoning(client: openai.OpenAI, is_parallel: bool) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "tools": NARROW, "tool_choice": "required", "seed": 1}
    reply = client.chat.completions.create(**options, parallel_tool_calls=is_parallel, max_tokens=600).choices[0]
    message: Any = reply.message
    assert message.content is None
    assert message.reasoning == "The user wants the weather."
    if is_parallel:
        assert message.tool_calls
        check_forced(message.tool_calls[:-1] if reply.finish_reason == "length" else message.tool_calls)
    else:
        assert (len(message.tool_calls), reply.finish_reason) == (1, "tool_calls")
        check_forced(message.tool_calls)


def test_strict_functions_are_held_to_their_schemas_wherever_the_model_calls_them(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=NARROW, parallel_tool_calls=False)
    message: Any = reply.choices[0].message
    assert (message.content, message.reasoning) == ("One moment.", "The user wants the weather.")
    assert (len(message.tool_calls), reply.choices[0].finish_reason) == (1, "tool_calls")
    check_forced(message.tool_calls)


@pytest.mark.parametrize("name", ["now", "get_weather"])
def test_named_function_is_called_and_the_reply_says_stop(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    options: Any = {"model": "tiny", "messages": MESSAGES, "tools": NARROW, "tool_choice": choice}
    reply = client.chat.completions.create(**options).choices[0]
    assert [call.function.name for call in reply.message.tool_calls or []] == [name]  # type: ignore[union-attr]
    check_forced(reply.message.tool_calls)
    assert reply.finish_reason == "stop"
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert [call.function.name for call in final.message.tool_calls or []] == [name]
    check_forced(final.message.tool_calls)
    assert final.finish_reason == "stop"


def test_anthropics_clients_get_the_same_calls_as_blocks(server: Server) -> None:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("get_weather", "now")]
    body = {"model": "tiny", "max_tokens": 1000, "messages": MESSAGES, "tools": tools}
    status, headers, raw = server.request("POST", "/v1/messages", body)
    plain = json.loads(raw)
    assert (status, plain["stop_reason"]) == (200, "tool_use")
    assert headers["request-id"] == headers["x-request-id"]
    assert [block["type"] for block in plain["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert plain["content"][0]["thinking"] == "The user wants the weather."
    assert [block["input"] for block in plain["content"][2:]] == [{"city": "Paris", "note": 'café "x"'}, {}]
    status, headers, raw = server.request("POST", "/v1/messages", body | {"stream": True})
    events = [json.loads(part.partition("data: ")[2]) for part in raw.decode().split("\n\n")[:-1]]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    written = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})]
    assert json.loads("".join(written).removesuffix("{}")) == plain["content"][2]["input"]


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}]
)
def test_forced_tools_of_anthropics_clients_are_held_to_their_schemas(server: Server, choice: dict[str, str]) -> None:
    tools = [
        {"name": tool["function"]["name"], "strict": True, "input_schema": tool["function"]["parameters"]}
        for tool in NARROW
    ]
    body = {"max_tokens": 1000, "messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": 1}
    status, _, raw = server.request("POST", "/v1/messages", body)
    reply = json.loads(raw)
    assert (status, reply["stop_reason"]) == (200, "tool_use")
    assert [block["type"] for block in reply["content"]] == ["thinking", "tool_use"]
    assert reply["content"][1]["input"].keys() == {"unit", "days"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs.regex"),
    ],
)
def test_what_nothing_enforces_beside_tools_is_refused(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=NARROW, **fields)
    assert caught.value.param == param


def test_a_reply_is_calls_or_an_answer_in_json(client: openai.OpenAI) -> None:
    """The text of the fake model's script is neither, so it is not written."""
    schema = {"type": "object", "properties": {"sky": {"enum": ["sunny", "cloudy"]}}, "required": ["sky"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    options: Any = {"model": "tiny", "messages": MESSAGES, "tools": NARROW, "response_format": form, "max_tokens": 1000}
    for seed in range(6):
        choice = client.chat.completions.create(**options, seed=seed).choices[0]
        with client.chat.completions.stream(**options, seed=seed) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert (streamed.content or None) == choice.message.content
        if choice.message.content is None:
            assert choice.finish_reason == "tool_calls"
            assert {call.function.name for call in choice.message.tool_calls or ()} <= {
                tool["function"]["name"] for tool in NARROW
            }
        else:
            assert choice.finish_reason == "stop"
            assert json.loads(choice.message.content)["sky"] in ("sunny", "cloudy")


@pytest.mark.parametrize("tools", [[], TOOLS, NARROW])
def test_reasoning_ends_when_its_budget_is_spent(client: openai.OpenAI, tools: Any) -> None:
    def ask(budget: int) -> Any:
        body = {"thinking_token_budget": budget}
        options: Any = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_tokens": 300, "extra_body": body}
        return client.chat.completions.create(**options, **({"tools": tools} if tools else {}))

    cut = ask(6)
    assert THOUGHT.startswith(cut.choices[0].message.reasoning)
    assert 3 <= len(cut.choices[0].message.reasoning) < len(THOUGHT)
    assert cut.usage.completion_tokens_details.reasoning_tokens == 6 + 2, "with its markers"
    whole = ask(60).choices[0].message
    assert whole.reasoning == THOUGHT
    assert (whole.content or "").startswith("One moment.")
    assert [call.function.name for call in whole.tool_calls or ()][:1] == ["get_weather"] * bool(tools)


def test_anthropics_budget_is_the_same(server: Server) -> None:
    body = {"max_tokens": 300, "messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 6}}
    status, _, raw = server.request("POST", "/v1/messages", body)
    reply = json.loads(raw)
    assert status == 200
    assert reply["usage"]["output_tokens_details"]["thinking_tokens"] == 6 + 2
    assert reply["content"][0]["thinking"] in THOUGHT[:-3]


def test_the_template_file_is_where_tools_go(server: Server) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "return_token_strs": True}
    status, _, raw = server.request("POST", "/tokenize", body)
    assert status == 200
    assert "".join(json.loads(raw)["token_strs"]).startswith('[{"type": "function", "function": {"name": "get_weather"')
