"""Grammars of tool calls: each family's format, with its control tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxserve.errors import UnsupportedParameterError
from jaxserve.frontend.grammars import calls
from jaxserve.frontend.grammars.calls import NamedGrammar, call_grammar
from jaxserve.frontend.messages import ChatMessage, FunctionDefinition, ToolChoice
from jaxserve.frontend.request import Conversation
from jaxserve.ipc.call_grammar import CallGrammar, Json, Text
from jaxserve.ipc.messages import Grammar
from jaxserve.tokenizer.control_tokens import ControlTokens
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_tools import tooled
from tests.unit.frontend.parsers.reading import output_format

__all__ = ["tooled"]
CLOSED: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def asked(
    tokenizer: Tokenizer,
    name: str,
    choice: Any,
    *,
    strict: bool | None = None,
    answer: NamedGrammar | None = None,
    parameters: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The calls that two tools, one of them strict or not, make with this choice; None without a grammar."""
    functions = [FunctionDefinition(name="f", strict=strict, parameters=parameters), FunctionDefinition(name="g")]
    conversation = Conversation(
        messages=[ChatMessage(role="user", content="Hi")],
        functions=functions,
        tool_choice=ToolChoice.read(choice),
        **options,
    )
    named = call_grammar(conversation, tokenizer, output_format(name), 9, answer)
    if named is None:
        return None
    assert named.grammar.kind == "calls"
    return msgspec.json.decode(named.grammar.text, type=CallGrammar)


def test_markers_that_are_control_tokens_are_known_by_their_ids(tokenizer: Tokenizer, tooled: Tokenizer) -> None:
    opener, closer = (tooled.encode(marker, False)[0] for marker in ("<tool_call>", "</tool_call>"))
    assert asked(tooled, "hermes", "required") == CallGrammar(
        (opener,),
        tuple((f'\n{{"name": "{name}", "arguments": ', Json(CLOSED), "}\n", closer) for name in "fg"),
        ("\n", opener),
        (),
    )
    assert asked(tokenizer, "hermes", "required").begin == ("<tool_call>",)


def test_a_vocabulary_chooses_among_the_ways_of_a_family(tokenizer: Tokenizer) -> None:
    calls = asked(tokenizer, "mistral", "required")
    assert (calls.begin, calls.separator, calls.end) == (("[TOOL_CALLS]", " ["), (", ",), ("]",))


@pytest.mark.parametrize(
    ("name", "markers", "begin"),
    [
        ("gemma", (), "<start_function_call>"),
        ("gemma", ("<|tool_call>", "<tool_call|>"), "<|tool_call>"),
        ("pythonic", (), "["),
        ("pythonic", ("<function_calls>", "</function_calls>"), "<function_calls>"),
        ("pythonic", ("<|tool_call_start|>", "<|tool_call_end|>"), "<|tool_call_start|>"),
        ("olmo3", (), "<function_calls>"),
        ("lfm2", (), "<|tool_call_start|>"),
    ],
)
def test_a_format_of_a_whole_family_has_the_calls_whose_markers_exist(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str, markers: tuple[str, ...], begin: str
) -> None:
    tokens = ControlTokens(dict(enumerate(markers)))
    monkeypatch.setattr(tokenizer, "control_tokens", tokens)
    first = asked(tokenizer, name, "required").begin[0]
    assert (markers[first] if isinstance(first, int) else first) == begin


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "enum": [[1, 2]]}, "enum of a list"),
        ({"enum": [[1, 2]]}, "enum of a list"),
        ({"const": [1]}, "const of a list"),
        ({"type": "array", "not": {"minItems": 3}}, "not of a list"),
        ({"type": "array", "anyOf": [{"items": {"type": "string"}}]}, "anyOf of a list"),
        ({"type": "array", "items": [{"type": "string"}]}, "items of a list"),
        ({"type": "array", "items": False}, "items of a list"),
        ({"type": "array", "minItems": 1}, "minItems of a list"),
        ({"minimum": 3}, "minimum of a value of any type"),
        ({"items": {"type": "string"}}, "items of a value of any type"),
        ({"properties": {"a": {}}}, "properties of a value of any type"),
        ({"type": "array", "items": {"maximum": 3}}, "maximum of a value of any type"),
        ({"type": "string", "then": {"maxLength": 3}}, "then of a string"),
        ({"type": "object", "not": {"required": ["a"]}}, "not of the whole object"),
    ],
)
def test_gemma_ignores_no_keyword(tokenizer: Tokenizer, schema: Any, keyword: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=keyword):
        asked(tokenizer, "gemma4", "required", parameters={"properties": {"a": schema}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["integer", "null"], "minimum": 1},
        {"type": ["string", "array", "null"], "maxLength": 3, "items": {"type": "integer"}},
        {"type": ["object", "string"], "pattern": "^a", "properties": {"b": {"type": "string"}}},
        {"maxLength": 3},
        {"anyOf": [{"type": "array"}, {"type": "null"}]},
        {"type": "string", "enum": ["a"]},
    ],
)
def test_keywords_of_other_types_and_annotations_are_no_constraints_for_gemma(
    tokenizer: Tokenizer, schema: Any
) -> None:
    notes: dict[str, Any] = {
        "title": "A",
        "description": "a",
        "default": None,
        "examples": [],
        "$comment": "",
        "deprecated": True,
    }
    notes |= {"readOnly": True, "writeOnly": False, "x-order": 3}
    plain, annotated = (
        asked(tokenizer, "gemma4", "required", parameters={"properties": {"a": each}})
        for each in (schema, schema | notes)
    )
    assert len(annotated.calls) == len(plain.calls) == 2


def test_a_schema_that_references_multiply_is_refused_for_gemma(tokenizer: Tokenizer) -> None:
    """Written out it has 5 ** 6 objects."""
    levels = {
        f"D{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/D{i + 1}"} for name in "abcde"}}
        for i in range(6)
    }
    schema = {"properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**levels, "D6": {"type": "string"}}}
    with pytest.raises(UnsupportedParameterError, match=r"a schema (with so many parts|that, written out)"):
        asked(tokenizer, "gemma4", "required", parameters=schema)
    wide: dict[str, Any] = {"properties": {f"a{i}": {} for i in range(128)}}
    assert asked(tokenizer, "gemma4", "required", parameters=wide) is not None


def test_choices_decide_what_is_held(tokenizer: Tokenizer) -> None:
    assert asked(tokenizer, "hermes", "auto") is None
    assert asked(tokenizer, "hermes", None) is None
    assert asked(tokenizer, "hermes", "none", strict=True) is None
    free = asked(tokenizer, "hermes", "auto", strict=True)
    assert (free.allows_text, [call[1].schema for call in free.calls]) == (True, [CLOSED, {"type": "object"}])
    forced = asked(tokenizer, "hermes", {"type": "function", "function": {"name": "g"}}, strict=True)
    assert (forced.allows_text, len(forced.calls), forced.separator) == (False, 1, None)
    assert asked(tokenizer, "hermes", "required", is_parallel=False).separator is None


def test_a_format_that_was_explained_has_one_forced_call_unless_the_request_wants_several(tokenizer: Tokenizer) -> None:
    assert asked(tokenizer, "generic", "required").separator is None
    assert asked(tokenizer, "generic", "required", is_parallel=True).separator is not None
    assert asked(tokenizer, "generic", "auto", strict=True).separator is not None


def test_an_answer_in_json_needs_calls_that_a_marker_begins(tokenizer: Tokenizer) -> None:
    answer = NamedGrammar(Grammar("json_schema", '{"type":"object"}'), "response_format")
    assert asked(tokenizer, "hermes", "auto", answer=answer).answer == '{"type":"object"}'
    assert asked(tokenizer, "hermes", "none", answer=answer) is None
    assert asked(tokenizer, "hermes", "required", answer=answer).answer == ""
    for name in ("llama3_json", "pythonic"):
        with pytest.raises(UnsupportedParameterError) as caught:
            asked(tokenizer, name, "auto", answer=answer)
        assert caught.value.param == "response_format"


def test_text_beside_calls_has_no_other_start_of_one(tokenizer: Tokenizer) -> None:
    free = asked(tokenizer, "qwen3_coder", "auto", strict=True)
    assert (free.begin, free.other_starts) == (("<tool_call>",), ("<function=",))
    assert asked(tokenizer, "pythonic", "auto", strict=True).is_bare


def test_ends_of_texts_that_are_control_tokens_are_known_by_their_ids(tooled: Tokenizer) -> None:
    """The text before one, a line break, is part of the text: no grammar could tell them apart."""
    closer = tooled.encode("</think>", False)[0]
    parts = calls._with_tokens((Text('"a"', "\n</think>\n"),), tooled.control_tokens.split)
    assert parts == (Text('("a") "\\n"'), closer, "\n")


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "functiongemma", "deepseek_v32"])
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a\n>b=": {"type": "string"}}},
        {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
    ],
)
def test_what_no_grammar_of_a_format_spells_is_refused(tokenizer: Tokenizer, name: str, schema: Any) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        asked(tokenizer, name, "required", parameters=schema)
    assert caught.value.param == "tools[0].function.parameters"
    assert "--tool-call-parser generic takes it" in str(caught.value)
    assert asked(tokenizer, "hermes", "required", parameters=schema) is not None


def test_a_format_of_a_raw_string_that_has_no_pattern_is_refused(tokenizer: Tokenizer) -> None:
    schema = {"properties": {"a": {"type": "string", "format": "iri"}}}
    with pytest.raises(UnsupportedParameterError, match="the format iri cannot be enforced"):
        asked(tokenizer, "glm45", "required", parameters=schema)


@pytest.mark.parametrize(
    ("choice", "strict", "param"),
    [("required", None, "tool_choice"), ("auto", True, "tools[0].function.strict")],
)
def test_channels_whose_calls_no_grammar_spells_are_refused(
    tokenizer: Tokenizer, choice: str, strict: Any, param: str
) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        asked(tokenizer, "harmony", choice, strict=strict)
    assert caught.value.param == param
