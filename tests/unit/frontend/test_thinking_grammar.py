"""Grammars after reasoning: where the constraint begins, and where a budget ends the reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import UnsupportedParameterError
from jaxserve.frontend.grammar import NamedGrammar, after_thinking
from jaxserve.frontend.messages import ChatMessage
from jaxserve.frontend.parsers.formats import CHANNEL_FORMATS, REASONING_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat, ParserSpec
from jaxserve.frontend.request import Conversation
from jaxserve.ipc.messages import Grammar, Thinking, ThinkingBudget
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_tools import HERMES, tooled

__all__ = ["tooled"]
YES = NamedGrammar(Grammar("regex", "yes"), "response_format")
REASONING = OutputFormat(reasoning=REASONING_FORMATS["qwen3"])


def found(tokenizer: Tokenizer, named: NamedGrammar | None, budget: int | None, **spec: Any) -> NamedGrammar | None:
    conversation = Conversation(messages=[ChatMessage(role="user", content="Hi")], thinking_budget=budget)
    return after_thinking(conversation, tokenizer, ParserSpec(**{"output_format": REASONING} | spec), named)


def test_reasoning_that_may_come_is_returned_with_its_control_tokens(tokenizer: Tokenizer, tooled: Tokenizer) -> None:
    opener, closer = (tooled.encode(marker, False)[0] for marker in ("<think>", "</think>"))
    for end, is_open in (("", False), ("<think>\n", True)):
        named = found(tooled, YES, None, prompt_end=end)
        assert named == NamedGrammar(Grammar("regex", "yes", Thinking((opener,), (closer,), is_open)), YES.param)
        named = found(tokenizer, YES, None, prompt_end=end)
        assert named == NamedGrammar(Grammar("regex", "yes", Thinking(("<think>",), ("</think>",), is_open)), YES.param)
    assert found(tooled, YES, None, prompt_end="<think>\n\n</think>\n\n") == YES
    assert found(tooled, YES, None, output_format=OutputFormat()) == YES
    assert found(tooled, None, None) is None


def test_a_budget_makes_a_grammar_of_any_reply(tooled: Tokenizer) -> None:
    closer = tooled.encode("</think>", False)[0]
    named = found(tooled, None, 9)
    assert named is not None
    assert named.grammar.thinking is not None
    assert named.grammar.thinking.budget == ThinkingBudget(9, closer)
    assert named.param == "thinking_token_budget"
    assert "TEXT" not in named.grammar.text
    markers = ",".join(str(tooled.encode(marker, False)[0]) for marker in ("<tool_call>", "</tool_call>"))
    called = found(tooled, None, 9, output_format=HERMES, tools={"f": {}})
    assert called is not None
    assert f"<[{markers}]>" in called.grammar.text
    assert found(tooled, None, 9, prompt_end="<think>\n\n</think>\n\n") is None


@pytest.mark.parametrize(
    ("named", "budget", "spec", "param"),
    [
        (YES, None, {"continued": "x"}, "response_format"),
        (YES, None, {"output_format": OutputFormat(channels=CHANNEL_FORMATS["harmony"])}, "response_format"),
        (None, 9, {"output_format": OutputFormat(channels=CHANNEL_FORMATS["harmony"])}, "thinking_token_budget"),
    ],
)
def test_what_no_grammar_spells_is_refused(
    tokenizer: Tokenizer, named: NamedGrammar | None, budget: int | None, spec: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        found(tokenizer, named, budget, **spec)
    assert caught.value.param == param
