"""Whatever text the grammar of calls admits, the parser reads calls whose arguments satisfy their schemas, however it is cut."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance import LLTokenizer

from jaxserve.config import StructuredConfig
from jaxserve.frontend.grammars.calls import call_grammar
from jaxserve.frontend.json_schema import intended_schema
from jaxserve.frontend.messages import ChatMessage, FunctionDefinition, ToolChoice
from jaxserve.frontend.parsers.formats import TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.request import Conversation
from jaxserve.ipc.call_grammar import CallGrammar, Either, Members, Text
from jaxserve.structured.compiling import Vocabulary, ll_tokenizer, new_matcher
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.frontend.parsers.reading import output_format, read

TOKENIZERS = Path(__file__).parents[3] / "fixtures" / "tokenizers"
NAMES = sorted(TOOL_FORMATS)
PLACE = {"type": "object", "properties": {"x": {"type": "number"}, "tag": {"type": "string"}}, "required": ["x"]}
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F", "</parameter"]},
        "days": {"type": "integer", "minimum": 2, "maximum": 40},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer", "boolean"]},
        "mixed": {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "code": {"type": "string", "pattern": "^[A-C]{2}$"},
        "level": {"enum": [1, "1", "high", None]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "unit", "place"],
    "$defs": {"Place": PLACE},
}
OPEN = {"type": "object", "properties": {"id": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
FUNCTIONS = {"book": BOOK, "book_open": OPEN, "now": None}
STRINGS = [
    *'ab"\\\'<>{}[](),:=/ \n', "é", "🐚", "1", "-2", "3.5", "true", "null", "None", "True", "A", "C", "F", "</", "high", "[1]",
    '"', '", ', "</parameter>", "</parameter", "</arg_value>", "<｜DSML｜", "<escape>", '<|"|>', '":', "x", "tag", "1e3", "\\n",
    *[json.dumps(name) + ":" for name in ("city", "unit", "days", "place", "x", "tag", "id")], *BOOK["properties"], "id",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZERS / "byte_level")


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return ll_tokenizer(tokenizer)


def calls_terms(terms: Any) -> Iterator[Any]:
    """Yield all terms, those inside others as well."""
    for term in terms:
        yield term
        if isinstance(term, Either):
            yield from calls_terms(part for option in term.options for part in option)
        elif isinstance(term, Members):
            yield from calls_terms(part for member in term.members for part in member.terms)


def asked(tokenizer: Tokenizer, name: str, **fields: Any) -> Conversation:
    functions = [FunctionDefinition(name=each, parameters=schema, strict=True) for each, schema in FUNCTIONS.items()]
    return Conversation(messages=[ChatMessage(role="user", content="Hi")], functions=functions, **fields)


class Walk:
    """A reply made of texts that the grammar admits, chosen at random."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: LLTokenizer, conversation: Conversation, name: str) -> None:
        named = call_grammar(conversation, tokenizer, OutputFormat(TOOL_FORMATS[name]), 64)
        assert named is not None
        self._matcher = new_matcher(named.grammar, vocabulary, StructuredConfig())
        encode = Vocabulary(tokenizer)
        self._encode = cache(lambda text: encode(text.encode()))
        grammar = msgspec.json.decode(named.grammar.text, type=CallGrammar)
        calls = [term for call in grammar.calls for term in call]
        around = (*grammar.begin, *(grammar.separator or ()), *grammar.end)
        texts = [term for term in (*calls_terms(calls), *around) if isinstance(term, str)]
        self._begin, self._end = ("".join(map(str, part)) for part in (grammar.begin, grammar.end))
        self._texts = [text for text in dict.fromkeys(texts) if text]
        self._ends = [term.end for term in calls_terms(calls) if isinstance(term, Text) and term.end]
        self._afters = [str(call[-1]) for call in grammar.calls]
        self._letters = sorted({letter for text in texts for letter in text} | set(string.printable))

    def reply(self, chance: random.Random, *, begins: bool, size: int = 20) -> str:
        """Return a whole reply; after `size` texts it ends as soon as it may. begins: it starts with a call."""
        matcher, text = self._matcher.deep_copy(), ""
        for step in range(400):
            if matcher.is_accepting() and step >= begins and (step > size or chance.random() < 0.1):
                return text
            for choice in self._choices(chance, step, is_late=step > size, begins=begins and step == 0):
                tokens = self._encode(choice)
                if matcher.validate_tokens(tokens) == len(tokens):
                    assert matcher.consume_tokens(tokens)
                    text += choice
                    break
            else:
                assert matcher.is_accepting(), f"no way on after {text!r}"
                return text
        raise AssertionError(f"no end of {text!r}")

    def _choices(self, chance: random.Random, step: int, *, is_late: bool, begins: bool) -> list[str]:
        """Return texts in the order in which they are tried."""
        if is_late:
            closing = ['"', "}", "]", ")"]
            groups = [[self._end] if self._end else [], self._ends, closing]
            rotated = [text for i in range(3) for text in groups[(step + i) % 3]]
            return [*rotated, *self._afters, *sorted(self._texts, key=str.isidentifier), ",", "1", *self._letters]
        first = [self._begin or self._texts[0]] if begins else []
        likely, others = [*self._texts], [*STRINGS]
        chance.shuffle(likely)
        chance.shuffle(others)
        return (
            [*first, *likely, *others, *self._letters]
            if chance.random() < 0.3
            else [*first, *others, *likely, *self._letters]
        )


def check(name: str, text: str, *, is_forced: bool) -> int:
    """Read the reply whole and cut, and check its calls. Return their number."""
    tools = {each: schema or {} for each, schema in FUNCTIONS.items()}
    reply = read(output_format(name), text, tools=tools)
    if is_forced:
        assert reply.calls, text
        assert reply.content == "", text
    for function, arguments in reply.calls:
        schema = FUNCTIONS[function]
        closed: Any = {"additionalProperties": False} if schema is None else intended_schema(schema, "parameters")
        jsonschema.validate(json.loads(arguments, strict=False), closed)
    return len(reply.calls)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_reply_that_the_grammar_admits_is_calls_that_fit(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, name: str, choice: str
) -> None:
    conversation = asked(tokenizer, name, tool_choice=ToolChoice.read(choice))
    walk = Walk(tokenizer, vocabulary, conversation, name)
    chance = random.Random(name + choice)
    counts = [check(name, walk.reply(chance, begins=i % 2 == 0), is_forced=choice == "required") for i in range(4)]
    assert sum(counts) >= 1
