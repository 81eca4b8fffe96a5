"""The output format of a model is chosen by flag, or by signs in its chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.frontend.encode import template_messages
from jaxserve.frontend.messages import CalledFunction, ChatMessage, MessageToolCall
from jaxserve.frontend.parsers.formats import (
    CHANNEL_FORMATS,
    REASONING_FORMATS,
    REASONING_PARSERS,
    TOOL_FORMATS,
    TOOL_PARSERS,
)
from jaxserve.frontend.parsers.output_format import choose_output_format
from jaxserve.runtime.settings import SETTINGS
from jaxserve.tokenizer.template import ChatTemplate
from tests.unit.frontend.parsers.reading import reply_of

TEMPLATES = Path(__file__).parents[2] / "tokenizer" / "data" / "templates"


def test_flags_offer_every_format() -> None:
    choices = {setting.name: setting.choices for setting in SETTINGS}
    assert set(choices["tool_call_parser"]) == TOOL_PARSERS.keys() > {"auto", "none", *TOOL_FORMATS, *CHANNEL_FORMATS}
    assert set(choices["reasoning_parser"]) == REASONING_PARSERS.keys() > {"none", *REASONING_FORMATS, *CHANNEL_FORMATS}


@pytest.mark.parametrize(
    ("tools", "reasoning", "found"),
    [
        ("deepseek_v3", "deepseek_v3", ("deepseek", "qwen3")),
        ("llama4_pythonic", "step3", ("pythonic", "deepseek_r1")),
        ("step3p5", "step3p5", ("qwen3_coder", "qwen3")),
        ("poolside_v1", "poolside_v1", ("glm45", "qwen3")),
        ("openai", "openai_gptoss", ("harmony", "harmony")),
        ("openai", "auto", ("harmony", "harmony")),
    ],
)
def test_names_of_vllm_are_choices(tools: str, reasoning: str, found: tuple[str, str]) -> None:
    chosen = choose_output_format([], tools, reasoning)
    assert str(chosen) == "output format: tool calls {}, reasoning {}".format(*found)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("qwen3_style", "hermes", "qwen3"),
        ("mistral_style", "mistral", None),
        ("smollm2_style", "generic", None),
        ("gemma_style", "generic", None),
    ],
)
def test_templates_of_families_are_known(template: str, tools: str | None, reasoning: str | None) -> None:
    chosen = choose_output_format([(TEMPLATES / f"{template}.jinja").read_text()], "auto", "auto")
    assert (chosen.tools and chosen.tools.name, chosen.reasoning and chosen.reasoning.name) == (tools, reasoning)


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ("<seed:tool_call>\n<function=example>\n<parameter=x>", "seed_oss"),
        ("<|python_tag|> or <function=example>{json}</function>", "generic"),
        ("<tool_call><invoke name=", "generic"),
        ("<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>{name}<arg_key>k</arg_key><arg_value>", "glm47"),
        ("tool['type'] + '<｜tool▁sep｜>' <｜tool▁calls▁begin｜>", "deepseek"),
        ("<｜DSML｜function_calls>", "deepseek_v32"),
        ("<{{ dsml_token }}function_calls>", "deepseek_v32"),
        ("<{{ dsml_token }}tool_calls>", "deepseek_v4"),
        ("wrapped in <function_calls></function_calls> XML tags", "olmo3"),
        ('<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">', "minimax_m2"),
        ("write <|tool_call|> and a JSON list of the tools used", "granite"),
        ("<|tool|>{tools}<|/tool|> <|tool_call|>", "phi4_mini_json"),
        ("<TOOLCALL>[{calls}]</TOOLCALL>", "nemotron_json"),
        ("<|START_ACTION|>[", "cohere"),
        ("List of tools: <|tool_list_start|>", "lfm2"),
        ("system_prompt + 'List of tools: ['", "lfm2"),
        ("{{- '<tool_calls>[' }}", "jamba"),
        ("<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>", "hy_v3"),
        ("set HYTK = ':opensource' %}{{ '<tool_sep{}>'.format(HYTK) }}", "hy_v3"),
        ("set HYTK = ':6124c78e' %}{{ '<arg_key{}>'.format(HYTK) }}", "hy_v4"),
        ("<|tool_calls|><|tool_call:begin|>", "solar_open"),
        ("<zyphra_tool_call>\n<function=example>\n<parameter=x>", "zaya_xml"),
        ('<dots_function_call>\n<invoke name="f">\n<parameter name="x">', "dots"),
        ("{{- '<|python_tag|>' }}", "llama3_json"),
        ('{"name": function name, "parameters": dictionary of names}', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("<start_function_call>", "functiongemma"),
        ("<|tool_call>call:", "gemma4"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ('<tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}}]</tool_calls>', "hunyuan_a13b"),
        ("'<|action_start|><|plugin|>'", "internlm"),
        ("<longcat_tool_call>", "longcat"),
        ("<function_call> {json}", "granite-20b-fc"),
        ("When using tools, make calls in a single JSON array:", "xlam"),
        ("<|tools_prefix|>[", "apertus"),
        ("nothing", "generic"),
    ],
)
def test_signs_of_a_template(text: str, tools: str) -> None:
    chosen = choose_output_format(["first", text], "auto", "none")
    assert (chosen.tools and chosen.tools.name, chosen.reasoning) == (tools, None)


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>", "qwen3"),
        ("<seed:think>", "seed_oss"),
        ("<|START_THINKING|>", "cohere"),
        ("<think></think> and <response></response>", "ernie45"),
        ("<think> <|extra_4|>", "hunyuan_a13b"),
        ("Here is my thought process:", "granite"),
        ("set HYTK = ':opensource' %}{{ '<think{}>'.format(HYTK) }}", "hy_v3"),
        ("set HYTK = ':6124c78e' %}{{ '<think{}>'.format(HYTK) }}", "hy_v4"),
        ("<|begin|>assistant<|think|>", "solar_open"),
    ],
)
def test_signs_of_reasoning_in_a_template(text: str, reasoning: str) -> None:
    chosen = choose_output_format([text], "none", "auto")
    assert chosen.reasoning is not None and chosen.reasoning.name == reasoning
    parser = chosen.parser({}, "")
    assert parser is not None
    events = [*parser.feed(f"{chosen.reasoning.opener}a b{chosen.reasoning.closer}c"), *parser.finish()]
    assert ["".join(each.text for each in events if each.kind == kind) for kind in ("reasoning", "content")] == [
        "a b",
        "c",
    ]


def test_a_template_without_a_place_for_tools_gets_the_generic_format() -> None:
    for flag in ("auto", "mistral"):
        chosen = choose_output_format(["[TOOL_CALLS]"], flag, "auto", takes_tools=False)
        assert chosen.tools is TOOL_FORMATS["generic"]
        assert chosen.explains_tools
    assert not choose_output_format(["[TOOL_CALLS]"], "none", "auto", takes_tools=False).has_tools


def test_channels_carry_both() -> None:
    for flags in (("auto", "auto"), ("harmony", "auto"), ("auto", "harmony"), ("harmony", "harmony")):
        chosen = choose_output_format(["<|start|>assistant<|channel|>final"], *flags)
        assert chosen.channels is CHANNEL_FORMATS["harmony"] and chosen.has_tools and chosen.has_reasoning
    with pytest.raises(ConfigError, match="--tool-call-parser harmony with --reasoning-parser qwen3"):
        choose_output_format([], "harmony", "qwen3")


def test_recipients_of_messages_are_known_by_their_tags() -> None:
    chosen = choose_output_format(["<|start|>assistant to={name}<|message|><atem:function_calls>"], "auto", "auto")
    assert chosen.channels is CHANNEL_FORMATS["muse_glimmer"]


def test_a_flag_decides_over_the_template() -> None:
    chosen = choose_output_format(["<tool_call> <think>"], "mistral", "deepseek_r1")
    assert chosen.tools is TOOL_FORMATS["mistral"]
    assert chosen.reasoning is REASONING_FORMATS["deepseek_r1"]
    assert choose_output_format(["<tool_call> <think>"], "none", "none").has_tools is False


CALLS = [("get_weather", {"city": "Paris", "note": 'a "b"\n<c>'}), ("now", {})]


@pytest.mark.parametrize(
    ("template", "tools", "num_calls"),
    [("qwen3_style", "auto", 2), ("mistral_style", "auto", 2), ("llama3_style", "llama3_json", 1)],
)
def test_what_a_template_writes_for_calls_is_read_as_these_calls(template: str, tools: str, num_calls: int) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    calls = [MessageToolCall(id=name, function=CalledFunction(name=name, arguments=a)) for name, a in CALLS[:num_calls]]
    messages = [ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", tool_calls=calls)]

    def render(num_messages: int, is_prompt: bool) -> str:
        return ChatTemplate(source, template).render(
            template_messages(messages[:num_messages]),
            add_generation_prompt=is_prompt,
            tools=None,
            variables={"bos_token": "<s>", "eos_token": "</s>"},
        )

    prompt = render(1, True)
    reply = render(2, False).removeprefix(prompt)
    parser = choose_output_format([source], tools, "auto").parser({"get_weather": {}, "now": {}}, prompt)
    assert parser is not None
    seen = reply_of(parser.feed(reply) + parser.finish())
    assert [(name, json.loads(arguments)) for name, arguments in seen.calls] == CALLS[:num_calls]


def test_ids_are_as_the_family_takes_them() -> None:
    assert re.fullmatch(r"call_[0-9a-f]{24}", choose_output_format([], "hermes", "none").new_call_id())
    assert re.fullmatch(r"[A-Za-z0-9]{9}", choose_output_format([], "mistral", "none").new_call_id())


def test_prompts_have_the_ids_from_which_a_family_reads_names() -> None:
    """Whatever ids the client has: those of this server, or of another one."""

    def calls(*ids: str | None) -> list[MessageToolCall]:
        return [MessageToolCall(id=each, function=CalledFunction(name="now")) for each in ids]

    messages = [
        ChatMessage(role="assistant", tool_calls=calls("call_1", None)),
        ChatMessage(role="tool", tool_call_id="call_1", content="12:00"),
        ChatMessage(role="assistant", tool_calls=calls("x")),
        ChatMessage(role="tool", tool_call_id="x", content="12:01"),
        ChatMessage(role="tool", tool_call_id="y", content="?"),
    ]
    prompt_id = choose_output_format([], "kimi_k2", "none").prompt_call_id
    first, one, second, other, unknown = template_messages(messages, prompt_id)
    assert [call["id"] for call in first["tool_calls"]] == ["functions.now:0", "functions.now:1"]
    assert (one["tool_call_id"], one["name"]) == ("functions.now:0", "now")
    assert [second["tool_calls"][0]["id"], other["tool_call_id"]] == ["functions.now:2"] * 2
    assert unknown["tool_call_id"] == "y"
    assert template_messages(messages)[0]["tool_calls"][0]["id"] == "call_1"
