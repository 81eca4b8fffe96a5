"""The grammar of a reply with tool calls, in the format in which the model writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from jaxserve.errors import unsupported
from jaxserve.frontend.grammars.one_of import MAX_PAIRS, without_one_of
from jaxserve.frontend.grammars.schema_checks import check_schema
from jaxserve.frontend.json_schema import intended_schema
from jaxserve.frontend.messages import FunctionDefinition
from jaxserve.frontend.parsers.arguments import Arguments
from jaxserve.frontend.parsers.calls import Section
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.parsers.tool_format import CallSyntax
from jaxserve.frontend.request import Conversation
from jaxserve.ipc.call_grammar import CallGrammar, Either, Member, Members, Term, Terminals, Terms, Text
from jaxserve.ipc.messages import Grammar
from jaxserve.tokenizer.tokenizer import Tokenizer

_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
_INDEX: Final = "{index}"
_NAME: Final = "{name}"
_NUMBER: Final = Text("/[0-9]{1,4}/")


class NamedGrammar(msgspec.Struct, frozen=True):
    """A grammar and the field of the request that asks for it."""

    grammar: Grammar
    param: str


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
    format_, channels = output_format.tools, output_format.channels
    syntax = _syntax(tokenizer, output_format)
    if syntax is None:
        path = f"{names.function.format(strict[0])}.strict" if strict else "tools"
        param = "tool_choice" if choice.is_forced else path if answer is None else answer.param
        raise unsupported(param, "is not supported together with tools by this model (--tool-call-parser)")
    if answer is not None and syntax.is_bare and channels is None:
        raise unsupported(
            answer.param,
            "is not supported together with tools by this model: no marker tells its calls from a reply in JSON "
            "(--tool-call-parser)",
        )
    tokens = tokenizer.control_tokens.split
    calls: list[Terms] = []
    for i, function in offered:
        if choice.name in (None, function.name):
            is_constrained = choice.is_forced or function.strict
            path = f"{names.function.format(i)}.{names.parameters}"
            pairs = MAX_PAIRS // len(offered)
            schema = _schema(function, path, max_depth, pairs) if is_constrained else _ANY_ARGUMENTS
            calls.append(_with_tokens(_call(syntax, function.name, Arguments(schema, path)), tokens))
    is_parallel = conversation.is_parallel
    if is_parallel is None:
        is_parallel = not (choice.is_forced and output_format.explains_tools)
    separator = syntax.separator if is_parallel and choice.name is None else None
    sections = () if format_ is None else format_.sections
    begin = _begin(sections, syntax, tokens)
    grammar = CallGrammar(
        begin,
        tuple(calls),
        None if separator is None else tokens(separator),
        tokens(syntax.end),
        allows_text=not choice.is_forced,
        is_bare=syntax.is_bare,
        excludes_brackets=any(not section.opener for section in sections),
        reasoning=output_format.reasoning.opener if output_format.reasoning is not None else "",
        other_starts=_other_starts(sections, begin, tokens),
        text_begin=() if channels is None else tokens(channels.answer),
        answer="" if answer is None else answer.grammar.text,
    )
    param = "tools" if answer is None else answer.param
    return NamedGrammar(Grammar("calls", msgspec.json.encode(grammar).decode()), param)


def _syntax(tokenizer: Tokenizer, output_format: OutputFormat) -> CallSyntax | None:
    """Return the first call syntax whose control tokens the vocabulary has."""
    if output_format.channels is not None:
        has_markers = tokenizer.control_tokens.include(output_format.channels.markers)
        return output_format.channels.syntax if has_markers else None
    syntaxes = output_format.tools.syntaxes if output_format.tools is not None else ()
    return next((one for one in syntaxes if tokenizer.control_tokens.include(one.control_tokens)), None)


def _schema(function: FunctionDefinition, param: str, max_depth: int, max_pairs: int) -> dict[str, Any]:
    """Return the schema of the arguments, which are always an object. max_pairs: see `without_one_of`."""
    if function.parameters is None:
        return _NO_PARAMETERS
    check_schema(function.parameters, param, max_depth)
    schema = without_one_of(intended_schema(function.parameters, param), max_pairs)
    return schema if "$ref" in schema else {"type": "object", **schema}


def _call(syntax: CallSyntax, name: str, arguments: Arguments) -> Terms:
    written = msgspec.json.encode(name).decode() if syntax.is_name_quoted else name
    header = _numbered(syntax.before.replace(_NAME, name) + written + syntax.between)
    return (*header, *syntax.arguments.terms(arguments), syntax.after)


def _numbered(text: str) -> Terms:
    """Return a text with numbers in the places for them."""
    first, *others = text.split(_INDEX)
    return (first, *(term for part in others for term in (_NUMBER, part)))


def _with_tokens(terms: Terms, tokens: Callable[[str], Terminals]) -> Terms:
    """Return the terms with control tokens by their ids."""
    return tuple(part for term in terms for part in _parts(term, tokens))


def _parts(term: Term, tokens: Callable[[str], Terminals]) -> Terms:
    match term:
        case str():
            return tokens(term)
        case Text() if term.end:
            parts = tokens(term.end)
            place = next((i for i, part in enumerate(parts) if isinstance(part, int)), None)
            if place is None:
                return (term,)
            begin = "".join(map(str, parts[:place]))
            pattern = f"({term.pattern}) {msgspec.json.encode(begin).decode()}" if begin else term.pattern
            return (Text(pattern), *parts[place:])
        case Either():
            return (Either(tuple(_with_tokens(option, tokens) for option in term.options)),)
        case Members():
            members = tuple(Member(_with_tokens(each.terms, tokens), each.count) for each in term.members)
            return (Members(members, _with_tokens(term.separator, tokens)),)
        case _:
            return (term,)


def _begin(sections: Sequence[Section], syntax: CallSyntax, tokens: Callable[[str], Terminals]) -> Terminals:
    """Return what precedes the calls; its first part is the text that a parser takes for the start of calls."""
    start = max((start for start in _starts(sections) if syntax.begin.startswith(start)), key=len, default="")
    return (*tokens(start), *tokens(syntax.begin.removeprefix(start)))


def _starts(sections: Sequence[Section]) -> Iterator[str]:
    return (start for section in sections for start in section.starts)


def _other_starts(sections: Sequence[Section], begin: Terminals, tokens: Callable[[str], Terminals]) -> tuple[str, ...]:
    """Return the starts of calls, besides the one of the grammar, that a text could have."""
    return tuple(
        start for start in dict.fromkeys(_starts(sections)) if begin[:1] != (start,) and tokens(start) == (start,)
    )
