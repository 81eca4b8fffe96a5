"""The grammar of a request's replies: a constraint or tool calls, after the model's reasoning."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

from jaxserve.config import StructuredConfig
from jaxserve.errors import InvalidRequestError, UnsupportedParameterError, invalid, unsupported
from jaxserve.frontend.checks import num_chars, shorten
from jaxserve.frontend.constraints import Constraint
from jaxserve.frontend.json_schema import intended_schema
from jaxserve.frontend.messages import FunctionDefinition
from jaxserve.frontend.parsers.output_format import OutputFormat, ParserSpec
from jaxserve.frontend.parsers.reasoning import ReasoningFormat
from jaxserve.frontend.parsers.tool_format import CallSyntax
from jaxserve.frontend.request import Conversation, GenerationRequest
from jaxserve.ipc.messages import CallGrammar, CallTemplate, Grammar, Thinking, ThinkingBudget
from jaxserve.tokenizer.tokenizer import Tokenizer

_COUNTS: Final = ("minItems", "minLength", "minProperties")
_MAX_COUNT: Final = 100_000
"""More than any context holds: a reply that needs as many would be cut off."""
_MAX_VALUES: Final = 1 << 17
"""Values of a schema: reading more would hold up the event loop."""
_GBNF_RULE: Final = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
"""The start of a rule in llama.cpp's format, in one line; rules of Lark have a single colon. Reads each line once."""
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}


class NamedGrammar(msgspec.Struct, frozen=True):
    """A grammar and the field of the request that asks for it."""

    grammar: Grammar
    param: str


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
                    raise _too_deep(param, max_depth) from None
            _check_schema(value, param, max_depth)
            grammar = Grammar("json_schema", msgspec.json.encode(intended_schema(value, param)).decode())
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


def call_grammar(
    conversation: Conversation,
    tokenizer: Tokenizer,
    output_format: OutputFormat,
    max_depth: int,
    answer: NamedGrammar | None = None,
) -> NamedGrammar | None:
    """Return the grammar that `tool_choice`, `strict` functions and `answer` require; None if none of them applies.

    A choice that forces a call constrains the arguments of every function to its schema; other choices constrain those
    of strict functions. answer: the grammar, a JSON schema, of a reply that calls no function.
    Raises UnsupportedParameterError if no grammar can express the model's calls.
    """
    offered, choice, names = conversation.offered, conversation.tool_choice, conversation.names
    strict = [i for i, function in offered if function.strict]
    if choice.is_forced:
        answer = None
    if not offered or not (choice.is_forced or strict or answer):
        return None
    syntax = _syntax(tokenizer, output_format)
    if syntax is None and (choice.is_forced or strict):
        raise unsupported(
            "tool_choice" if choice.is_forced else f"{names.function.format(strict[0])}.strict",
            "is not supported: nothing can hold calls to a form in the format in which this model writes them "
            "(--tool-call-parser)",
        )
    if syntax is None or (answer is not None and not syntax.begin):
        assert answer is not None, "the other reasons have their own error"
        raise unsupported(
            answer.param,
            "is not supported together with tools by this model: no marker tells its calls from a reply in JSON "
            "(--tool-call-parser)",
        )
    tokens = tokenizer.control_tokens.split
    templates = []
    for i, function in offered:
        if choice.name in (None, function.name):
            is_constrained = choice.is_forced or function.strict
            path = f"{names.function.format(i)}.{names.parameters}"
            schema = _arguments(function, path, max_depth) if is_constrained else _ANY_ARGUMENTS
            name = msgspec.json.encode(function.name).decode() if syntax.is_name_quoted else function.name
            before = tokens(syntax.before + name + syntax.between)
            templates.append(CallTemplate(before, schema, tokens(syntax.after)))
    is_parallel = conversation.is_parallel
    if is_parallel is None:
        is_parallel = not (choice.is_forced and output_format.explains_tools)
    separator = syntax.separator if is_parallel and choice.name is None else None
    calls = CallGrammar(
        tokens(syntax.begin),
        templates,
        None if separator is None else tokens(separator),
        tokens(syntax.end),
        allows_text=not choice.is_forced,
        reasoning=output_format.reasoning.opener if output_format.reasoning is not None else "",
        answer="" if answer is None else answer.grammar.text,
    )
    param = "tools" if answer is None else answer.param
    return NamedGrammar(Grammar("calls", msgspec.json.encode(calls).decode()), param)


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
        raise _unsupported(param, "with this model's format of reasoning (--reasoning-parser none)")
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


def _check_schema(schema: dict[str, Any], param: str, max_depth: int) -> None:
    places: list[tuple[Any, int]] = [(schema, 1)]
    if "x-guidance" in schema:
        raise invalid(param, "x-guidance: options of the compiler are not for requests")
    num_values = 0
    while places:
        value, depth = places.pop()
        num_values += 1
        if num_values > _MAX_VALUES:
            raise invalid(param, f"it has more than {_MAX_VALUES} values")
        if depth > max_depth:
            raise _too_deep(param, max_depth)
        if isinstance(value, dict):
            for name in _COUNTS:
                if isinstance(count := value.get(name), int) and count > _MAX_COUNT:
                    raise invalid(param, f"{name}: at most {_MAX_COUNT}, got {shorten(count)}")
            places += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            places += [(child, depth + 1) for child in value]


def _too_deep(param: str, max_depth: int) -> InvalidRequestError:
    return invalid(param, f"nested deeper than {max_depth} (--max-grammar-depth)")


def _syntax(tokenizer: Tokenizer, output_format: OutputFormat) -> CallSyntax | None:
    """Return the first call syntax whose control tokens the vocabulary has."""
    syntaxes = output_format.tools.syntaxes if output_format.tools is not None else ()
    return next((one for one in syntaxes if tokenizer.control_tokens.include(one.control_tokens)), None)


def _arguments(function: FunctionDefinition, param: str, max_depth: int) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object."""
    if function.parameters is None:
        return _NO_PARAMETERS
    _check_schema(function.parameters, param, max_depth)
    schema = intended_schema(function.parameters, param)
    return schema if "$ref" in schema else {"type": "object", **schema}


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
