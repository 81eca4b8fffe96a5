"""Grammars of tool calls: each family's format, with its control tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from jaxserve.errors import UnsupportedParameterError
from jaxserve.frontend.grammar import NamedGrammar, call_grammar
from jaxserve.frontend.messages import ChatMessage, FunctionDefinition, ToolChoice
from jaxserve.frontend.parsers.formats import TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.request import Conversation
from jaxserve.ipc.messages import CallGrammar, CallTemplate, Grammar
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_tools import tooled

__all__ = ["tooled"]
CLOSED: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def asked(
    tokenizer: Tokenizer,
    name: str,
    choice: Any,
    *,
    strict: bool | None = None,
    answer: NamedGrammar | None = None,
    **options: Any,
) -> Any:
    """The calls that two tools, one of them strict or not, make with this choice; None without a grammar."""
    functions = [FunctionDefinition(name="f", strict=strict), FunctionDefinition(name="g")]
    conversation = Conversation(
        messages=[ChatMessage(role="user", content="Hi")],
        functions=functions,
        tool_choice=ToolChoice.read(choice),
        **options,
    )
    named = call_grammar(conversation, tokenizer, OutputFormat(TOOL_FORMATS[name]), 9, answer)
    if named is None:
        return None
    assert named.grammar.kind == "calls"
    return msgspec.json.decode(named.grammar.text, type=CallGrammar)


def test_markers_that_are_control_tokens_are_known_by_their_ids(tokenizer: Tokenizer, tooled: Tokenizer) -> None:
    opener, closer = (tooled.encode(marker, False)[0] for marker in ("<tool_call>", "</tool_call>"))
    assert asked(tooled, "hermes", "required") == CallGrammar(
        (opener,),
        [CallTemplate((f'\n{{"name": "{name}", "arguments": ',), CLOSED, ("}\n", closer)) for name in "fg"],
        ("\n", opener),
        (),
    )
    assert asked(tokenizer, "hermes", "required").begin == ("<tool_call>",)


def test_a_vocabulary_chooses_among_the_ways_of_a_family(tokenizer: Tokenizer) -> None:
    calls = asked(tokenizer, "mistral", "required")
    assert (calls.begin, calls.separator, calls.end) == (("[TOOL_CALLS] [",), (", ",), ("]",))


def test_choices_decide_what_is_held(tokenizer: Tokenizer) -> None:
    assert asked(tokenizer, "hermes", "auto") is None
    assert asked(tokenizer, "hermes", None) is None
    assert asked(tokenizer, "hermes", "none", strict=True) is None
    free = asked(tokenizer, "hermes", "auto", strict=True)
    assert (free.allows_text, [template.schema for template in free.templates]) == (True, [CLOSED, {"type": "object"}])
    forced = asked(tokenizer, "hermes", {"type": "function", "function": {"name": "g"}}, strict=True)
    assert (forced.allows_text, len(forced.templates), forced.separator) == (False, 1, None)
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


@pytest.mark.parametrize(
    ("choice", "strict", "param"),
    [("required", None, "tool_choice"), ("auto", True, "tools[0].function.strict")],
)
def test_formats_that_no_grammar_spells_are_refused(tokenizer: Tokenizer, choice: str, strict: Any, param: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        asked(tokenizer, "pythonic", choice, strict=strict)
    assert caught.value.param == param
