"""Each family's calls, as its models write them, become names and JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.frontend.parsers.reading import TOOLS, output_format, read

WEATHER = {"city": "Par}is", "days": 3}
JSON = json.dumps(WEATHER)
NOW = ("now", {})

ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ' + JSON + "}\n</tool_call>",
    "jamba": '<tool_calls>[\n  {"name": "get_weather", "arguments": ' + JSON + "}\n]</tool_calls>",
    "llama3_json": '{"name": "get_weather", "parameters": ' + JSON + "}",
    "pythonic": "[get_weather(city='Par}is', days=3)]",
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + JSON + "}]",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar}is\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par}is</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par}is</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    + JSON
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Par}is</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Par}is</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "hy_v3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Par}is</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>",
    "hy_v4": "<tool_calls:6124c78e>\n<tool_call:6124c78e>get_weather\n<arg_key:6124c78e>city</arg_key:6124c78e>\n"
    "<arg_value:6124c78e>Par}is</arg_value:6124c78e>\n<arg_key:6124c78e>days</arg_key:6124c78e>\n"
    "<arg_value:6124c78e>3</arg_value:6124c78e>\n</tool_call:6124c78e>\n</tool_calls:6124c78e>",
    "solar_open": "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>"
    + JSON
    + "<|tool_call:end|>",
    "zaya_xml": "<zyphra_tool_call>\n<function=get_weather>\n<parameter=city>\nPar}is\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</zyphra_tool_call>",
    "dots": '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Par}is</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</dots_function_call>',
    "hunyuan_a13b": '<tool_calls>[{"name": "get_weather", "arguments": ' + JSON + "}]</tool_calls>",
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": ' + JSON + "}<|action_end|>",
    "longcat": '<longcat_tool_call>\n{"name": "get_weather", "arguments": ' + JSON + "}\n</longcat_tool_call>",
    "granite-20b-fc": '<function_call> {"name": "get_weather", "arguments": ' + JSON + "}",
    "xlam": '[{"name": "get_weather", "arguments": ' + JSON + "}]",
    "apertus": '<|tools_prefix|>[{"get_weather": ' + JSON + "}]<|tools_suffix|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Par}is</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Par}is</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": ' + JSON + "}]",
    "phi4_mini_json": '<|tool_call|>[{"name": "get_weather", "arguments": ' + JSON + "}]<|/tool_call|>",
    "nemotron_json": '<TOOLCALL>[{"name": "get_weather", "arguments": ' + JSON + "}]</TOOLCALL>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    + JSON
    + "}\n]<|END_ACTION|>",
    "functiongemma": "<start_function_call>call:get_weather{city:<escape>Par}is<escape>,days:3}<end_function_call>",
    "gemma": "<start_function_call>call:get_weather{city:<escape>Par}is<escape>,days:3}<end_function_call>",
    "olmo3": "<function_calls>\nget_weather(city='Par}is', days=3)\n</function_calls>",
    "lfm2": "<|tool_call_start|>[get_weather(city='Par}is', days=3)]<|tool_call_end|>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Par}is<|"|>,days:3}<tool_call|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + JSON
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    + JSON
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "muse_glimmer": ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Par}is</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + JSON,
}

VARIANTS = [
    ("hermes", '<tool_call>{"arguments": ' + JSON + ', "name": "get_weather"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": ' + json.dumps(JSON) + "}</tool_call>"),
    ("hermes", '<tool_call>[{"name": "get_weather", "arguments": ' + JSON + "}]</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": ' + JSON + "</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": ' + JSON + "}"),
    ("jamba", '<tool_calls>[{"name": "get_weather", "arguments": ' + json.dumps(JSON) + "}"),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": ' + JSON + "}"),
    ("llama3_json", ' {"type": "function", "function": "get_weather", "parameters": ' + JSON + "}"),
    ("pythonic", '[get_weather(days=3, city="Par}is")]'),
    ("pythonic", '<|python_start|>[get_weather(city="Par}is", days=3,)]<|python_end|>'),
    ("olmo3", '<function_calls>\nget_weather(city="Par}is", days=3)\n</function_calls>'),
    ("pythonic", "<function_calls>\nget_weather(city='Par}is', days=3)\n</function_calls>"),
    ("pythonic", "<|tool_call_start|>[get_weather(city='Par}is', days=3)]<|tool_call_end|>"),
    ("olmo3", "[get_weather(city='Par}is', days=3)]"),
    ("lfm2", "[get_weather(city='Par}is', days=3)]"),
    ("gemma", '<|tool_call>call:get_weather{city:<|"|>Par}is<|"|>,days:3}<tool_call|>'),
    ("mistral", "[TOOL_CALLS]get_weather" + JSON),
    ("mistral", "[TOOL_CALLS]get_weather[ARGS]" + JSON),
    ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]" + JSON),
    ("qwen3_coder", "<function=get_weather><parameter=city>Par}is</parameter><parameter=days>3</parameter></function>"),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Par}is", days=3)]<|tool_call_end|>'),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par}is</arg_value><arg_key>days</arg_key>"
     "<arg_value>3</arg_value></tool_call>"),
    ("glm45", "<tool_call> get_weather \n<arg_key>days</arg_key><arg_value> 3 </arg_value><arg_key>city</arg_key><arg_value>Par}is</arg_value></tool_call>"),
    ("jamba", '<tool_calls>\n{"name": "get_weather", "arguments": ' + JSON + "}\n</tool_calls>"),
    ("hy_v3", "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
     "</arg_key:opensource>\n<arg_value:opensource>Par}is</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n"
     "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>"),
    ("hy_v4", "<tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Par}is</arg_value><arg_key>days</arg_key>"
     "<arg_value>3</arg_value></tool_call></tool_calls>"),
    ("minimax_m2", '<invoke name="get_weather"><parameter name="city">Par}is</parameter><parameter name="days">3</parameter></invoke>'),
    ("seed_oss", "<function=get_weather><parameter=city>Par}is</parameter><parameter=days>3</parameter></function>"),
    ("phi4_mini_json", 'functools[{"name": "get_weather", "arguments": ' + JSON + "}]"),
    ("nemotron_json", '<TOOLCALL>[{"name": "get_weather", "arguments": ' + JSON + "}"),
    ("gemma4", '<|tool_call>call:get_weather{"city": "Par}is", days: 3}<tool_call|>'),
    ("deepseek", "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>"),
    ("kimi_k2", "<|tool_call_begin|> functions.get_weather:12 <|tool_call_argument_begin|> " + JSON + " <|tool_call_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>get_weather<|tool_call_argument_begin|>" + JSON),
    ("harmony", "<|channel|>commentary<|message|>" + "<|end|><|start|>assistant to=functions.get_weather<|channel|>"
     "commentary json<|message|> " + JSON + "<|call|>"),
]  # fmt: skip


def arguments(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(text)) for name, text in calls]


@pytest.mark.parametrize(("name", "text"), [*ONE_CALL.items(), *VARIANTS])
def test_a_call_is_read(name: str, text: str) -> None:
    reply = read(output_format(name), text)
    assert [(call, arguments_) for call, arguments_ in arguments(reply.calls)] == [("get_weather", WEATHER)]
    assert reply.content == ""


@pytest.mark.parametrize(("name", "text"), [*ONE_CALL.items(), *VARIANTS])
def test_a_complete_call_is_counted_when_its_arguments_end(name: str, text: str) -> None:
    parser = output_format(name).parser(TOOLS, "")
    assert parser is not None
    parser.feed(text.partition("Par")[0])
    assert parser.num_calls_read == 0
    parser.feed("Par" + text.partition("Par")[2])
    assert parser.num_calls_read == (name != "harmony" or "<|call|>" in text)
    parser.finish()
    assert parser.num_calls_read == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '{0}\n<tool_call>{{"name": "now"}}</tool_call>'),
        ("jamba", '<tool_calls>[{{"name": "get_weather", "arguments": {1}}},\n{{"name": "now"}}]</tool_calls>'),
        ("llama3_json", '{0}; {{"name": "now", "parameters": {{}}}}'),
        ("mistral", '{0}[TOOL_CALLS][{{"name": "now", "arguments": null}}]'),
        ("mistral", '[TOOL_CALLS][{{"name": "get_weather", "arguments": {1}}}, {{"name": "now", "arguments": ""}}]'),
        ("qwen3_coder", "{0}\n<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("glm45", "{0}\n<tool_call>now</tool_call>"),
        ("glm45", "{0}\n<tool_call>now\n</tool_call>"),
        ("deepseek_v32", '{5}<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'),
        ("hy_v3", "{6}<tool_call>now<tool_sep></tool_call></tool_calls>"),
        ("hunyuan_a13b", '<tool_calls>[{{"name": "get_weather", "arguments": {1}}}, {{"name": "now"}}]</tool_calls>'),
        ("longcat", '{0}\n<longcat_tool_call>{{"name": "now"}}</longcat_tool_call>'),
        ("granite-20b-fc", '{0}\n<function_call> {{"name": "now", "arguments": {{}}}}'),
        ("xlam", '[{{"name": "get_weather", "arguments": {1}}}, {{"name": "now", "arguments": {{}}}}]'),
        ("apertus", '<|tools_prefix|>[{{"get_weather": {1}}}, {{"now": {{}}}}]<|tools_suffix|>'),
        ("hy_v4", "{7}<tool_call:6124c78e>now</tool_call:6124c78e></tool_calls:6124c78e>"),
        ("solar_open", "{0}<|tool_call:begin|>1<|tool_call:name|>now<|tool_call:args|>{{}}<|tool_call:end|>"),
        ("zaya_xml", "{0}\n<zyphra_tool_call>\n<function=now>\n</function>\n</zyphra_tool_call>"),
        ("minimax_m2", '{4}<invoke name="now">\n</invoke>\n</minimax:tool_call>'),
        ("seed_oss", "{0}\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"),
        ("granite", '<|tool_call|>[{{"name": "get_weather", "arguments": {1}}}, {{"name": "now", "arguments": {{}}}}]'),
        ("phi4_mini_json", 'functools[{{"name": "get_weather", "arguments": {1}}}, {{"name": "now"}}]'),
        ("nemotron_json", '<TOOLCALL>[{{"name": "get_weather", "arguments": {1}}}, {{"name": "now"}}]</TOOLCALL>'),
        (
            "cohere",
            '{0}<|START_ACTION|>[{{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}]<|END_ACTION|>',
        ),
        ("gemma4", "{0}<|tool_call>call:now{{}}<tool_call|>"),
        ("deepseek", "{2}\n<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        (
            "kimi_k2",
            "{3}<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("harmony", "{0}<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>"),
        (
            "muse_glimmer",
            '{0}<|eom|><|start|>assistant to=now.now<|message|><atem:invoke name="now.now"></atem:invoke><|eot|>',
        ),
        ("pythonic", '[get_weather(city="Par}}is", days=3), now()]'),
        ("olmo3", '<function_calls>\nget_weather(city="Par}}is", days=3)\nnow()\n</function_calls>'),
    ],
)
def test_two_calls_are_read(name: str, text: str) -> None:
    first = ONE_CALL[name]
    ends = (
        "<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>", "</minimax:tool_call>", "</｜DSML｜function_calls>",
        "</tool_calls>", "</tool_calls:6124c78e>",
    )  # fmt: skip
    whole = text.format(first, JSON, *map(first.removesuffix, ends))
    assert arguments(read(output_format(name), whole).calls) == [("get_weather", WEATHER), NOW]


@pytest.mark.parametrize("name", sorted(set(ONE_CALL) - {"llama3_json", "pythonic", "harmony", "muse_glimmer", "xlam"}))
def test_content_around_a_call_is_content(name: str) -> None:
    reply = read(output_format(name), f" Let me see.\n\n{ONE_CALL[name]}\n\nThere. \n")
    assert arguments(reply.calls) == [("get_weather", WEATHER)]
    assert reply.content == " Let me see.There. \n"


@pytest.mark.parametrize("name", sorted(ONE_CALL))
def test_text_without_a_call_is_content_unchanged(name: str) -> None:
    for text in ("", " ", "Hello", "  a < b [1] {2} \n", "the <tool_cal and [TOOL_ end <", '```json\n{"a": 1}\n```\n'):
        reply = read(output_format(name), text)
        assert (reply.content, reply.calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call> is a marker"),
        ("hermes", '<tool_call>{"city": "Paris"}</tool_call>'),
        ("hermes", '<tool_call>{"name": {"first": "x"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_wea'),
        ("llama3_json", '{"city": "Paris", "name": "now"}'),
        ("llama3_json", '{"name": "Paris", "parameters": {}}'),
        ("llama3_json", "[1, 2]"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("pythonic", "[1] is a citation"),
        ("pythonic", "[print(x=1)]"),
        ("pythonic", "now(x=1)"),
        ("pythonic", '[get_weather("Paris")]'),
        ("mistral", "[TOOL_CALLS] no call here"),
        ("qwen3_coder", "<tool_call>\nno function"),
        ("qwen3_coder", "<function=" + "x" * 1000 + ">"),
        ("glm45", "<tool_call> is a marker</tool_call>"),
        ("glm45", "<tool_call>get_wea"),
        ("minimax_m2", "<minimax:tool_call> none </minimax:tool_call>"),
        ("granite", "<|tool_call|> none"),
        ("cohere", "<|START_ACTION|>[]<|END_ACTION|>"),
        ("gemma4", "<|tool_call>get_weather{}"),
        ("deepseek", "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|>none<|tool_calls_section_end|>"),
        ("deepseek_v32", '<｜DSML｜function_calls> <｜DSML｜invoke name="x'),
        ("hy_v3", "<tool_calls>none</tool_calls>"),
        ("apertus", '<|tools_prefix|>[{"now": 5}]<|tools_suffix|>'),
        ("xlam", '[{"name": "print", "arguments": {}}]'),
        ("internlm", "<|action_start|><|plugin|> none"),
    ],
)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    reply = read(output_format(name), text)
    assert (reply.content, reply.calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "partial"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"city": "Pa', '{"city": "Pa'),
        ("llama3_json", '{"name": "now", "parameters": {"city": "Pa', '{"city": "Pa'),
        ("mistral", '[TOOL_CALLS]now{"city": "Pa', '{"city": "Pa'),
        ("deepseek", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"city": "Pa', '{"city": "Pa'),
        ("kimi_k2", '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"city": "Pa', '{"city": "Pa'),
        ("harmony", '<|channel|>commentary to=functions.now<|message|>{"city": "Pa', '{"city": "Pa'),
        ("pythonic", '[now(city="Pa', '{"city": "Pa'),
        ("qwen3_coder", "<function=now><parameter=city>Pa", '{"city": "Pa'),
        ("glm45", "<tool_call>now\n<arg_key>city</arg_key><arg_value>Pa", '{"city": "Pa'),
        ("minimax_m2", '<invoke name="now"><parameter name="city">Pa', '{"city": "Pa'),
        ("gemma4", '<|tool_call>call:now{city:<|"|>Pa', '{"city": "Pa'),
        ("deepseek_v32", '<｜DSML｜invoke name="now"><｜DSML｜parameter name="city" string="true">Pa', '{"city": "Pa'),
        ("apertus", '<|tools_prefix|>[{"now": {"city": "Pa', '{"city": "Pa'),
    ],
)
def test_a_call_cut_short_keeps_what_is_there(name: str, text: str, partial: str) -> None:
    assert read(output_format(name), text).calls == [("now", partial)]


def test_text_after_a_list_of_calls_is_content() -> None:
    reply = read(output_format("pythonic"), "[now()] now(x=1)")
    assert (reply.calls, reply.content) == ([("now", "{}")], "now(x=1)")


def test_a_header_that_is_too_long_hides_no_later_call() -> None:
    long = "<function=" + "x" * 300
    reply = read(output_format("qwen3_coder"), f"{long}<function=now></function>")
    assert (reply.calls, reply.content) == ([("now", "{}")], long)


def test_two_calls_may_share_a_wrapper() -> None:
    call = "<function=now>\n</function>"
    reply = read(output_format("qwen3_coder"), f"<tool_call>\n{call}\n{call}\n</tool_call>\ndone")
    assert (reply.calls, reply.content) == ([("now", "{}")] * 2, "done")


def test_a_closer_inside_a_string_ends_nothing() -> None:
    value = {"city": '</tool_call> <tool_call> \\" {'}
    text = '<tool_call>{"name": "now", "arguments": ' + json.dumps(value) + "}</tool_call>done"
    reply = read(output_format("hermes"), text)
    assert arguments(reply.calls) == [("now", value)]
    assert reply.content == "done"


def test_a_call_that_stops_making_sense_ends_there() -> None:
    reply = read(output_format("pythonic"), '<|python_start|>[now(city="Paris", 7)]')
    assert reply.calls == [("now", '{"city": "Paris"')]
    assert reply.content == ", 7)]"
    reply = read(output_format("hermes"), '<tool_call>{"name": "now", "arguments": {"a": tru</tool_call>ok')
    assert reply.calls == [("now", '{"a": tru')]
    assert reply.content == "ok"


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a\\nb\\\\c\\x41\\u00e9\\U0001F41A\\q"', "a\nb\\cAé🐚\\q"),
        ('"\\ud83d\\udc1a"', "🐚"),
        ('"""two\n"lines" here"""', 'two\n"lines" here'),
        ("''", ""),
        ("-3", -3),
        ("1_000", 1000),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("007", 7),
        ("True", True),
        ("None", None),
        ("false", False),
        ("[1, 'a', [True], ()]", [1, "a", [True], []]),
        ("{'a': {'b': (1, 2)}, \"c\": None}", {"a": {"b": [1, 2]}, "c": None}),
        ("{}", {}),
        ("Paris", "Paris"),
        ("1e999", "1e999"),
        ("nan", "nan"),
        ("9" * 100, int("9" * 100)),
        ("9" * 5000, "9" * 5000),
        ('{"a\\"b": 1, "\\u00e9": [2], \'\\\\\': 3}', {'a"b': 1, "é": [2], "\\": 3}),
        ('"a\\/b"', "a/b"),
        ("__import__", "__import__"),
    ],
)
def test_python_literals_become_json(literal: str, value: Any) -> None:
    assert arguments(read(output_format("pythonic"), f"[now(x={literal})]").calls) == [("now", {"x": value})]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('<escape>it\'s "so"\n<escape>', 'it\'s "so"\n'),
        ("[<escape>a<escape>,{k:1}]", ["a", {"k": 1}]),
        ("{a:{b:true},c:null}", {"a": {"b": True}, "c": None}),
        ("New York", "New York"),
        ("10:30", "10:30"),
        ("-2.5", -2.5),
    ],
)
def test_gemma_values_become_json(text: str, value: Any) -> None:
    call = f"<start_function_call>call:now{{x:{text}}}<end_function_call>"
    assert arguments(read(output_format("functiongemma"), call).calls) == [("now", {"x": value})]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("city", "3", "3"),
        ("city", "true", "true"),
        ("city", "\nline\n\n", "\nline\n\n"),
        ("city", 'a "b" \\ <c>', 'a "b" \\ <c>'),
        ("days", "3", 3),
        ("days", "three", "three"),
        ("exact", "True", True),
        ("places", '["a", 1]', ["a", 1]),
        ("note", "null", None),
        ("note", "5", "5"),
        ("limit", "2.5", 2.5),
        ("unknown", "5", "5"),
        ("note", "    return 1\n", "    return 1\n"),
        ("note", '{"a": 1}', '{"a": 1}'),
        ("note", '"quoted"', '"quoted"'),
        ("note", "True", "True"),
        ("note", "", ""),
        ("text", "  two\n\n", "  two\n\n"),
        ("text", "[1]", "[1]"),
        ("text", "null", None),
        ("either", " 5", 5),
        ("either", " five ", " five "),
        ("either", "2.5", "2.5"),
        ("limit", "3", 3),
        ("limit", " none ", "none"),
        ("size", "2", 2),
        ("share", "1", 1),
        ("fixed", "3", 3),
        ("place", '{"x": 1}', {"x": 1}),
        ("described", '{"x": 1}', {"x": 1}),
        ("maybe", '{"x": 1}', {"x": 1}),
        ("maybe", "None", None),
        ("tree", "[1, 2]", [1, 2]),
        ("broken", "5", "5"),
    ],
)
def test_tagged_values_have_the_type_of_the_schema(parameter: str, text: str, value: Any) -> None:
    assert tagged(parameter, text) == {parameter: value}


@pytest.mark.parametrize(
    ("parameter", "flag", "text", "value"),
    [
        ("city", ' string="true">', "3", "3"),
        ("city", ' string="false">', "3", "3"),
        ("days", ' string="true">', "3", "3"),
        ("days", ' string="false">', "3", 3),
        ("either", ' string="true">', "3", "3"),
        ("either", ' string="false">', "3", 3),
        ("unknown", ' string="false">', '{"a": [1]}', {"a": [1]}),
        ("unknown", ' string="false">', "so", "so"),
        ("unknown", ">", "3", "3"),
        ("days", ">", "3", 3),
    ],
)
def test_a_flag_says_whether_a_value_is_a_string(parameter: str, flag: str, text: str, value: Any) -> None:
    call = (
        f'<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="{parameter}"{flag}{text}'
        "</｜DSML｜parameter></｜DSML｜invoke>"
    )
    assert arguments(read(output_format("deepseek_v32"), call).calls) == [("get_weather", {parameter: value})]


def test_the_end_of_a_parameter_inside_a_string_of_json_does_not_end_it() -> None:
    value = {"x": 'a</parameter>b\\"</parameter>'}
    assert tagged("place", json.dumps(value)) == {"place": value}
    assert tagged("note", '["</parameter>') == {"note": '["'}, "a string ends there"
    reply = read(output_format("qwen3_coder"), '<function=get_weather><parameter=place>{"x": "</parameter>end')
    assert (reply.calls, reply.content) == ([("get_weather", '{"place": ')], '{"x": "</parameter>end')


QUOTED = {
    "f": {
        "type": "object",
        "properties": {
            "y": {"type": ["string", "array"]},
            "z": {"type": "object"},
            "w": {"type": "string"},
        },
    }
}


@pytest.mark.parametrize(("name", "value"), [("y", '[5" pipe]'), ("y", '["'), ("z", '{"a": "C:\\"}')])
@pytest.mark.parametrize("space", ["", "\n", " \n\n "])
def test_an_odd_quote_hides_neither_later_parameters_nor_the_end_of_the_call(name: str, value: str, space: str) -> None:
    for format_, begin, middle, last, end in (
        ("qwen3_coder", f"<function=f><parameter={name}>", f"</parameter>{space}<parameter=w>", "</parameter>", "</function>"),
        ("glm45", f"<tool_call>f<arg_key>{name}</arg_key><arg_value>", f"</arg_value>{space}<arg_key>w</arg_key><arg_value>",
         "</arg_value>", "</tool_call>"),
        ("minimax_m2", f'<invoke name="f"><parameter name="{name}">', f'</parameter>{space}<parameter name="w">', "</parameter>",
         "</invoke>"),
    ):  # fmt: skip
        reply = read(output_format(format_), begin + value + middle + "hi" + last + end + "ok", tools=QUOTED)
        assert (arguments(reply.calls), reply.content) == ([("f", {name: value, "w": "hi"})], "ok")
        reply = read(output_format(format_), begin + value + last + space + end + "ok", tools=QUOTED)
        assert (arguments(reply.calls), reply.content) == ([("f", {name: value})], "ok")


def test_the_end_of_a_parameter_and_other_text_may_be_inside_a_string_of_json() -> None:
    value = {"x": "</parameter> \n</parameter><param </function>"}
    assert tagged("place", json.dumps(value)) == {"place": value}


@pytest.mark.parametrize("text", ["a\n", "\n\na", "    return 1\n", "", " "])
def test_a_string_on_no_lines_of_its_own_keeps_its_line_breaks(text: str) -> None:
    for name, call in (
        ("glm45", f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
        ("minimax_m2", f'<invoke name="get_weather">\n<parameter name="city">{text}</parameter>\n</invoke>'),
    ):
        assert arguments(read(output_format(name), call).calls) == [("get_weather", {"city": text})]


def tagged(parameter: str, text: str, tools: Any = TOOLS) -> Any:
    """The arguments of a call with one parameter, of the first of `tools`."""
    call = f"<function={next(iter(tools))}>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>"
    [(_, found)] = arguments(read(output_format("qwen3_coder"), call, tools=tools).calls)
    return found


def test_the_schema_of_a_function_may_be_a_reference() -> None:
    days = {"type": "object", "properties": {"days": {"type": "integer"}}}
    assert tagged("days", "3", {"f": {"$ref": "#/$defs/Days", "$defs": {"Days": days}}}) == {"days": 3}
    assert tagged("days", "3", {"f": {"allOf": [{"$ref": "#/$defs/Days"}], "$defs": {"Days": days}}}) == {"days": 3}
    escaped = {"$ref": "#/$defs/all%20the~1d%C3%A4ys%25", "$defs": {"all the/däys%": days}}
    assert tagged("days", "3", {"f": escaped}) == {"days": 3}


def test_a_schema_of_many_references_is_read_in_bounded_time() -> None:
    chain = {f"D{i}": {"$ref": f"#/$defs/D{i + 1}"} for i in range(5000)}
    doubled = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(40)}
    for definitions in (chain, doubled):
        tools = {"f": {"properties": {"x": {"$ref": "#/$defs/D0"}}, "$defs": definitions}}
        assert tagged("x", "5", tools) == {"x": "5"}


def test_nesting_beyond_the_limit_is_no_value() -> None:
    reply = read(output_format("pythonic"), "[now(x=" + "[" * 100 + "]" * 100 + ")]")
    assert reply.calls == [("now", '{"x": ' + "[" * 64)]


def test_harmony_channels_are_reasoning_content_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a":1}<|call|>'
    )
    reply = read(output_format("harmony"), text, prompt_end="<|end|><|start|>assistant")
    assert (reply.reasoning, reply.content) == ("Think.\nMore.", "I will look.")
    assert reply.calls == [("now", '{"a":1}')]
    without_tools = read(output_format("harmony"), text, tools={})
    assert without_tools.calls == []
    assert without_tools.content == 'I will look.\n{"a":1}'


def test_harmony_goes_on_with_the_message_that_the_prompt_began() -> None:
    begun = read(output_format("harmony"), "ris.<|end|>", prompt_end="<|start|>assistant<|channel|>final<|message|>Pa")
    assert (begun.content, begun.reasoning) == ("ris.", "")
    parser = output_format("harmony").parser(TOOLS, "cut off", continued="Pa")
    assert parser is not None
    assert [event.text for event in parser.feed(" ris.")] == [" ris."]
    cut = read(output_format("harmony"), "<|channel|>anal", prompt_end="<|start|>assistant")
    assert (cut.content, cut.reasoning) == ("", "")


def test_muse_glimmer_reads_calls_only_in_messages_to_functions() -> None:
    call = '<atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>'
    text = (
        f" to=self<|message|>Perhaps {call}?<|eom|><|start|>assistant to=now<|message|>{call}<|eom|>"
        f"<|start|>assistant to=user<|message|>I called {call}.<|eot|>"
    )
    reply = read(output_format("muse_glimmer"), text, prompt_end="<|start|>assistant")
    assert (reply.reasoning, reply.content) == (f"Perhaps {call}?", f"I called {call}.")
    assert reply.calls == [("now", "{}")]
    without_tools = read(output_format("muse_glimmer"), text, tools={}, prompt_end="<|start|>assistant")
    assert (without_tools.calls, without_tools.reasoning) == ([], reply.reasoning)
    assert without_tools.content == f"{call}\nI called {call}."
    cut = read(output_format("muse_glimmer"), " to=se", prompt_end="<|start|>assistant")
    assert (cut.content, cut.reasoning) == ("", "")
