"""Chat templates: their variables, permissions and limits."""

from __future__ import annotations

import json
import tracemalloc
from datetime import datetime
from typing import Any

import pytest

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.tokenizer.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, *, tools: Any = None, variables: Any = None, **limits: Any) -> str:
    template = ChatTemplate(source, "tiny", **limits)
    return template.render(messages, add_generation_prompt=True, tools=tools, variables=variables or {})


def rejection(source: str, messages: Any = USER, **limits: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages, **limits)
    assert caught.value.param == "messages"
    assert caught.value.status == 400
    return caught.value.message


def test_blocks_are_trimmed() -> None:
    assert (
        render("{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n") == "user\n"
    )


def test_loop_controls_work() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "023"


def test_loop_variables_survive_the_time_check() -> None:
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}"
    assert render(source, USER * 3) == "1/3,2/3,3/3."


def test_empty_loops_take_the_else_branch() -> None:
    assert render("{% for m in missing %}x{% else %}none{% endfor %}") == "none"


def test_filters_and_set_blocks_keep_their_value() -> None:
    source = "{% set t | upper | trim %} a{{ messages[0].content | title }} {% endset %}[{{ t }}]{% filter upper %}b{% endfilter %}"
    assert render(source) == "[AHI]B"
    assert render("{{ messages | map(attribute='role') | list | length }}{{ missing | default('d') }}") == "1d"


def test_generation_blocks_are_their_content() -> None:
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "hi"


def test_tojson_keeps_unicode_and_html() -> None:
    value = {"b": "<é & '>", "a": 1}
    assert render("{{ tools | tojson }}", tools=[value]) == json.dumps([value], ensure_ascii=False)
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=[value]) == json.dumps(value, ensure_ascii=False, indent=2)


def test_strftime_now_formats_the_current_time() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_raise_exception_becomes_an_error_of_the_messages() -> None:
    message = rejection("{{ raise_exception('Roles must alternate') }}")
    assert message == "The chat template does not accept these messages: Roles must alternate"


@pytest.mark.parametrize(
    "source", ["{{ messages[5].content }}", "{{ 1 + 'x' }}", "{{ missing.x }}", "{% for x in 3 %}{% endfor %}"]
)
def test_an_error_inside_the_template_is_an_error_of_the_request(source: str) -> None:
    assert rejection(source).startswith("The chat template does not accept these messages: ")


def test_null_fields_are_missing_and_absent_tools_are_none() -> None:
    source = "{{ messages[0].name is defined }} {{ tools is none }} {{ documents is none }}"
    assert render(source, [{"role": "user", "content": "x", "name": None}]) == "False True True"


def test_reasoning_is_seen_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [{"role": "assistant", "content": "x", name: "because"}]
        assert render("{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}", messages) == "becausebecause"


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", "a\nb"),
        ("{{ messages[0]['content'] | trim }}", "a\nb"),
        ("{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}", "[a][b]"),
        ("{% set c = messages[0].content %}{% for p in c %}[{{ p.text }}]{% endfor %}", "[a][b]"),
        (
            "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}"
            "[{{ p.text }}]{% endfor %}{% endif %}{% endmacro %}{{ show(messages[0].content) }}",
            "[a][b]",
        ),
        (  # as Kimi K2.5's
            "{% macro show(m) %}{% set c = m.get('content') %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
            "[{{ p.text }}]{% endfor %}{% endif %}{% endmacro %}{{ show(messages[0]) }}",
            "[a][b]",
        ),
        ("{% for p in messages[0].content or [] %}[{{ p.text }}]{% endfor %}", "[a][b]"),
    ],
)
def test_parts_reach_templates_that_loop_over_them_and_are_fused_for_others(source: str, text: str) -> None:
    assert render(source, PARTS) == text


def test_a_plain_string_is_wrapped_only_for_templates_without_strings() -> None:
    only_parts = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
    assert render(only_parts) == "[hi]"
    both = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + only_parts + "{% endif %}"
    assert render(both) == "hi"


@pytest.mark.parametrize("role", ["system", "assistant", "tool", "user"])
def test_texts_of_all_but_users_are_fused(role: str) -> None:
    strings = "{% if m.content is string %}{{ m.content }}{% else %}"
    parts = "{% for p in m.content %}[{{ p.text or p.type }}]{% endfor %}"
    source = "{% for m in messages %}" + strings + parts + "{% endif %}{% endfor %}"
    assert render(source, [{**PARTS[0], "role": role}]) == ("[a][b]" if role == "user" else "a\nb")
    shown = [{"role": role, "content": [*PARTS[0]["content"], {"type": "image"}]}]
    assert render(source, shown) == "[a][b][image]"
    only_parts = render("{% for m in messages %}" + parts + "{% endfor %}", [{**PARTS[0], "role": role}])
    assert only_parts == ("[a][b]" if role == "user" else "[a\nb]")


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{% for p in messages[0].content %}{% endfor %}"])
def test_parts_other_than_text_are_rejected(source: str) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://x"}}
    message = rejection(source, [{"role": "user", "content": [part]}])
    assert "found a content part of type 'image_url'" in message


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ self._TemplateReference__context }}",
        "{% include 'x' %}",
        "{{ lipsum(n=1000000) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_has_no_way_out(source: str) -> None:
    try:
        text = render(source)
    except InvalidRequestError:
        return
    assert text == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 40 }}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_stopped(source: str) -> None:
    assert "takes longer than 0.1 s" in rejection(source, time_limit_s=0.1)


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = '-'.join([n.s, n.s]) %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
        "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
        "{% set t | upper %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
        "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{% set n = namespace(s='ab') %}"
        "{% for i in range(99) %}{% set n.s = twice(n.s) %}{% endfor %}",
        "{{ range(99999) | list }}",
        "{{ messages[0].content * 1000000000000 }}",
        "{{ 1000000000000 * messages[0].content }}",
        "{{ messages * 1000000000000 }}",
        "{% for i in range(9999) %}{{ messages }}{% endfor %}",
        "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}"
        "{{ n.s | tojson(indent=1) }}",
    ],
)
def test_a_template_that_makes_too_much_text_is_stopped(source: str) -> None:
    assert "over the limit of 10000" in rejection(source, max_output_chars=10000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ([{'k' * 9000: 1}] * 1000) | tojson }}",
        "{% set n = 2 ** 2000 %}{{ ([n * n * n * n * n] * 4000) | tojson }}",
        "{{ ([[[1]]] * 1000) | tojson(indent=9000) }}",
        "{{ ([1] * 1000) | tojson(separators=(',' * 9000, ':')) }}",
    ],
    ids=["keys", "numbers", "indent", "separators"],
)
def test_json_of_too_much_text_is_not_made_first(source: str) -> None:
    tracemalloc.start()
    try:
        assert "over the limit of 10000" in rejection(source, max_output_chars=10000)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20, "the whole would take 9 MB"
    finally:
        tracemalloc.stop()


def test_huge_powers_are_stopped() -> None:
    assert "a power of more than 4096 bits" in rejection("{% set n = 9 %}{{ (n ** 999999999) % 7 }}")
    assert render("{% set n = 9 %}{{ n ** 2 }}") == "81"


def test_endless_recursion_is_an_error_of_the_request() -> None:
    assert rejection("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")


def test_a_template_that_does_not_compile_names_its_line() -> None:
    with pytest.raises(CheckpointError, match="model: chat template, line 2: "):
        ChatTemplate("ok\n{% if %}", "model")


@pytest.mark.parametrize("source", ["{% break %}", "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"])
def test_a_template_that_python_cannot_compile_is_rejected(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"^model: chat template: "):
        ChatTemplate(source, "model")


def test_variables_cannot_reach_the_render_call() -> None:
    # Names of arguments that renderers and tokenizers take are plain variables here.
    variables = {"tokenize": True, "self": "s", "context": "c", "environment": "e", "args": [], "kwargs": {}}
    assert render("{{ tokenize }}{{ context }}{{ environment }}", variables=variables) == "Truece"


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"b": "<é>", "a": [1]}}}
CALLER = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    "way", ["c.arguments | tojson", "c.arguments", "'' ~ c.arguments", "'' + c.arguments + ''", "c.arguments | string"]
)
def test_arguments_print_as_json_in_every_template(way: str) -> None:
    source = "{% set c = messages[0].tool_calls[0].function %}{{ " + way + " }}"
    assert render(source, CALLER) == '{"b": "<é>", "a": [1]}'


def test_arguments_are_an_object_to_a_template_that_looks_into_them() -> None:
    source = (
        "{% set c = messages[0].tool_calls[0].function %}{{ c.arguments is mapping }} {{ c.arguments is string }}"
        "{% for key, value in c.arguments.items() %} {{ key }}={{ value }}{% endfor %}"
    )
    assert render(source, CALLER) == "True False b=<é> a=[1]"


def test_writing_arguments_out_counts_towards_the_limit() -> None:
    source = "{% set x = '' + messages[0].tool_calls[0].function.arguments %}"
    large = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x" * 2000}}}]}]
    assert "over the limit of 1000" in rejection(source, large, max_output_chars=1000)


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{{ messages[0].role }}", "system"),
        ("{% if messages[0].role in ['system', 'developer'] %}{{ messages[0].role }}{% endif %}", "developer"),
    ],
)
def test_the_developer_role_becomes_system_if_the_template_does_not_know_it(source: str, role: str) -> None:
    assert render(source, [{"role": "developer", "content": "x"}]) == role


def test_variables_that_a_template_reads_are_known() -> None:
    source = "{% if enable_thinking is defined %}{% set shown = tools %}{% endif %}{{ shown }}"
    variables = ChatTemplate(source, "tiny").variables
    assert {"enable_thinking", "tools"} <= variables
    assert "messages" not in variables


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ tools[0].name }}{{ xml_tools is defined }}", "fFalse"),
        ("{% if tools %}{% set xml_tools = tools %}{% endif %}{{ xml_tools[0].name }}", "f"),
        ("{{ xml_tools[0].name }}", "f"),
        ("none", "none"),
    ],
)
def test_tools_come_under_the_name_that_the_template_reads(source: str, shown: str) -> None:
    assert render(source, tools=[{"name": "f"}]) == shown
    assert ChatTemplate(source, "tiny").takes_tools is (shown != "none")
