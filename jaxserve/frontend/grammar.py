"""The grammar of a request's replies: a constraint or tool calls, after the model's reasoning."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from jaxserve.config import StructuredConfig
from jaxserve.errors import UnsupportedParameterError, invalid, unsupported
from jaxserve.frontend.checks import num_chars
from jaxserve.frontend.constraints import Constraint
from jaxserve.frontend.grammars.calls import NamedGrammar, call_grammar
from jaxserve.frontend.grammars.one_of import without_one_of
from jaxserve.frontend.grammars.schema_checks import check_schema, too_deep
from jaxserve.frontend.json_schema import intended_schema
from jaxserve.frontend.parsers.channels import ChannelFormat
from jaxserve.frontend.parsers.output_format import ParserSpec
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.request import Conversation, GenerationRequest
from jaxserve.ipc.messages import Grammar, Thinking, ThinkingBudget
from jaxserve.tokenizer.tokenizer import Tokenizer

_GBNF_RULE: Final = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
"""The start of a rule in llama.cpp's format, in one line; rules of Lark have a single colon. Reads each line once."""


def grammar_of(
    request: GenerationRequest, spec: ParserSpec, tokenizer: Tokenizer, config: StructuredConfig
) -> NamedGrammar | None:
    """Return the grammar that constrains the replies; None if nothing does. Raises InvalidRequestError."""
    max_depth = config.max_grammar_depth
    named = None
    if request.constraint is not None:
        check_size(request.constraint, config.max_grammar_size)
        named = constraint_grammar(request.constraint, max_depth)
    if not isinstance(request.prompt, Conversation):
        return named
    if request.prompt.offered:
        named = call_grammar(request.prompt, tokenizer, spec.output_format, max_depth, named) or named
    return after_thinking(request.prompt, tokenizer, spec, named)


def check_size(constraint: Constraint, max_bytes: int) -> None:
    """Raise InvalidRequestError for a constraint whose grammar has more bytes than are allowed, before anything reads it.

    A schema may have white space and texts that its grammar has not: it is refused if it is 16 times as long.
    """
    size, most = num_chars(constraint.value), max_bytes * (16 if constraint.is_json else 1)
    if size > most:
        raise invalid(constraint.param, f"at most {max_bytes} bytes (--max-grammar-size), got {size}")


def constraint_grammar(constraint: Constraint, max_depth: int) -> NamedGrammar:
    """Return the grammar of a constraint. Raises InvalidRequestError for schemas that no reply could follow."""
    param, value = constraint.param, constraint.value
    match constraint.kind:
        case "json":
            if isinstance(value, str):
                try:
                    value = msgspec.json.decode(value, type=dict[str, Any])
                except msgspec.DecodeError as error:
                    raise invalid(param, f"it is no JSON object: {error}") from None
                except RecursionError:
                    raise too_deep(param, max_depth) from None
            check_schema(value, param, max_depth)
            grammar = Grammar(
                "json_schema", msgspec.json.encode(without_one_of(intended_schema(value, param))).decode()
            )
        case "json_object":
            grammar = Grammar("json_schema", '{"type":"object"}')
        case "choice":
            if not all(value) or not value:
                raise invalid(param, "at least one choice, and none that is empty")
            grammar = Grammar("lark", "start: " + " | ".join(map(json.dumps, value)))
        case "regex":
            grammar = Grammar("regex", value)
        case "grammar":
            grammar = Grammar("gbnf" if _GBNF_RULE.search(value) else "lark", value)
    return NamedGrammar(grammar, param)


def after_thinking(
    conversation: Conversation, tokenizer: Tokenizer, spec: ParserSpec, named: NamedGrammar | None
) -> NamedGrammar | None:
    """Return the grammar preceded by the model's reasoning; None if neither is constrained.

    Raises UnsupportedParameterError if the format of the model's reasoning does not allow it.
    """
    reasons = spec.output_format.has_reasoning
    budget, budget_name = conversation.thinking_budget if reasons else None, conversation.names.thinking_budget
    if named is None and budget is None:
        return None
    param = named.param if named is not None else budget_name
    if spec.continued is not None:
        raise _unsupported(param, "for the rest of a message (continue_final_message)")
    if spec.output_format.channels is not None:
        if named is None:
            raise _unsupported(param, "with this model's format of reasoning (--reasoning-parser none)")
        return _in_channels(spec.output_format.channels, tokenizer, spec, named)
    reasoning = spec.output_format.reasoning
    if reasoning is None:
        return named
    begun = reasoning.prefill(spec.prompt_end)
    if begun.endswith(reasoning.closer):
        return named
    closers = tokenizer.encode(reasoning.closer, add_special_tokens=False)
    if budget is not None and len(closers) != 1:
        raise _unsupported(budget_name, f"by this model: {reasoning.closer} is no token of its vocabulary")
    thinking = Thinking(
        tokenizer.control_tokens.split(reasoning.opener),
        tokenizer.control_tokens.split(reasoning.closer),
        is_open=bool(begun),
        budget=None if budget is None else ThinkingBudget(budget, closers[0]),
    )
    grammar = named.grammar if named is not None else _any_reply(tokenizer, spec, reasoning)
    return NamedGrammar(msgspec.structs.replace(grammar, thinking=thinking), param)


def _in_channels(channels: ChannelFormat, tokenizer: Tokenizer, spec: ParserSpec, named: NamedGrammar) -> NamedGrammar:
    """Return the grammar after any messages of reasoning; one that is not of calls is in the channel of answers."""
    tokens = tokenizer.control_tokens
    if not tokens.include(channels.markers) or not spec.prompt_end.endswith(channels.begin):
        raise _unsupported(named.param, f"with a prompt that does not end with {channels.begin} as control tokens")
    opener, closer = map(tokens.split, channels.reasoning)
    answer = () if named.grammar.kind == "calls" else tokens.split(channels.answer)
    thinking = Thinking(opener, closer, is_open=False, answer_begin=answer)
    return NamedGrammar(msgspec.structs.replace(named.grammar, thinking=thinking), named.param)


def _any_reply(tokenizer: Tokenizer, spec: ParserSpec, reasoning: ReasoningFormat) -> Grammar:
    """Return a grammar of any text that does not begin with reasoning, with the control tokens that mark calls."""
    format_ = spec.output_format.tools if spec.tools else None
    markers = [marker for section in format_.sections for marker in section.markers] if format_ is not None else []
    token_ids = sorted(tokenizer.control_tokens.in_texts([marker for marker in markers if marker]))
    more = f" (<[{','.join(map(str, token_ids))}]> TEXT)*" if token_ids else ""
    opener = re.escape(reasoning.opener).replace("/", r"\/")
    return Grammar(
        "lark",
        f"start: FIRST{more}\nFIRST: /(?s:.*)/ & ~/\\s*{opener}(?s:.*)/\n" + ("TEXT: /(?s:.*)/\n" if more else ""),
    )


def _unsupported(param: str, where: str) -> UnsupportedParameterError:
    return unsupported(param, f"is not supported {where}")
