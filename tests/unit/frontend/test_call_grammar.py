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
