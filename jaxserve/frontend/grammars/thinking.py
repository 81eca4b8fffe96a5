"""Grammars that begin after the model's reasoning, which a token budget may end."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from jaxserve.errors import UnsupportedParameterError, unsupported
from jaxserve.frontend.grammars.constraint import NamedGrammar
from jaxserve.frontend.parsers.parser_spec import ParserSpec
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.tokenization import Tokenization
from jaxserve.ipc.messages import Grammar, Thinking, ThinkingBudget

_BUDGET: Final = "thinking_token_budget"


def after_thinking(
    tokens: Tokenization, spec: ParserSpec, named: NamedGrammar | None, budget: int | None
) -> NamedGrammar | None:
    """Return the grammar preceded by the model's reasoning; None if neither is constrained.

    budget: number of tokens after which the reasoning ends. Raises UnsupportedParameterError if the format of the model's
    reasoning does not allow either.
    """
    if named is None and budget is None:
        return None
    param = named.param if named is not None else _BUDGET
    if spec.continued is not None:
        raise _unsupported(param, "for the rest of a message (continue_final_message)")
    if spec.output_format.channels is not None:
        raise _unsupported(param, "with this model's format of reasoning (--reasoning-parser none)")
    reasoning = spec.output_format.reasoning
    if reasoning is None:
        if budget is not None:
            raise _unsupported(_BUDGET, "by a model that does not reason (--reasoning-parser)")
        return named
    begun = reasoning.prefill(spec.prompt_end)
    if begun.endswith(reasoning.closer):
        return named
    spelled = tokens.tokenizer.with_control_tokens
    thinking = Thinking(
        spelled(reasoning.opener),
        spelled(reasoning.closer),
        is_open=bool(begun),
        budget=None if budget is None else ThinkingBudget(budget, _closing_token(tokens, reasoning)),
    )
    grammar = named.grammar if named is not None else _any_reply(tokens, spec, reasoning)
    return NamedGrammar(msgspec.structs.replace(grammar, thinking=thinking), param)


def _closing_token(tokens: Tokenization, reasoning: ReasoningFormat) -> int:
    token_ids = tokens.tokenizer.encode(reasoning.closer, add_special_tokens=False)
    if len(token_ids) != 1:
        raise _unsupported(_BUDGET, f"by this model: {reasoning.closer} is no token of its vocabulary")
    return token_ids[0]


def _any_reply(tokens: Tokenization, spec: ParserSpec, reasoning: ReasoningFormat) -> Grammar:
    """Return a grammar of any text that does not begin with reasoning, with the control tokens that mark calls."""
    format_ = spec.output_format.tools if spec.tools else None
    markers = [marker for section in format_.sections for marker in section.markers] if format_ is not None else []
    token_ids = sorted(tokens.tokenizer.special_tokens_in([marker for marker in markers if marker]))
    more = f" (<[{','.join(map(str, token_ids))}]> TEXT)*" if token_ids else ""
    opener = re.escape(reasoning.opener).replace("/", r"\/")
    return Grammar(
        "lark",
        f"start: FIRST{more}\nFIRST: /(?s:.*)/ & ~/\\s*{opener}(?s:.*)/\n" + ("TEXT: /(?s:.*)/\n" if more else ""),
    )


def _unsupported(param: str, where: str) -> UnsupportedParameterError:
    return unsupported(param, f"is not supported {where}")
