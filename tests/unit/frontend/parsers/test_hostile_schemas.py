"""Schemas of functions that are costly, malformed or merely unusual become a grammar or one error in every format that writes arguments one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from jaxserve.config import StructuredConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.grammars.calls import NamedGrammar, call_grammar
from jaxserve.frontend.messages import ChatMessage, FunctionDefinition, ToolChoice
from jaxserve.frontend.parsers.formats import TOOL_FORMATS
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.request import Conversation
from jaxserve.structured.compiling import ll_tokenizer, new_matcher
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.frontend.parsers.test_written_calls import TOKENIZERS

FORMATS = ["qwen3_coder", "deepseek_v32", "pythonic", "gemma4"]
"""One of each kind: tags, a flag for strings, Python's calls, Gemma's."""
TAGGED = FORMATS[:2]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZERS / "byte_level")


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return ll_tokenizer(tokenizer)


def forced(tokenizer: Tokenizer, name: str, parameters: dict[str, Any]) -> NamedGrammar:
    functions = [FunctionDefinition(name="f", parameters=parameters)]
    message = ChatMessage(role="user", content="Hi")
    choice = ToolChoice.read("required")
    conversation = Conversation(messages=[message], functions=functions, tool_choice=choice)
    named = call_grammar(conversation, tokenizer, OutputFormat(TOOL_FORMATS[name]), 64)
    assert named is not None
    return named


def of_x(x: Any, **definitions: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x}, "required": ["x"], "$defs": definitions}


def chain(**keywords: Any) -> dict[str, Any]:
    """Return definitions each of which refers to the next one twice."""
    last = {f"a{20}": {"type": "string", "maxLength": 9}}
    two = ({f"a{i}": {**keywords, "anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2}} for i in range(20))
    return {name: schema for each in two for name, schema in each.items()} | last


A = {"$ref": "#/$defs/a"}
COSTLY = [
    of_x(A, a={"anyOf": [A]}),
    of_x({**A, "type": ["string", "integer"]}, a={"anyOf": [A]}),
    of_x(A, a={"type": "string", "anyOf": [A, A]}),
    of_x({"$ref": "#/$defs/a0"}, **chain(type="string")),
    of_x({"$ref": "#/$defs/a0"}, **chain()),
    of_x({"type": "string", "anyOf": [{"pattern": "ab" * 1000}] * 400}),
]
MALFORMED = [
    {"type": "object", "properties": ["x"]},
    {"type": "object", "properties": {"x": {"type": "string"}}, "required": 5},
    {"type": "object", "properties": {"x": {"type": "string"}}, "required": [["x"]]},
    of_x({"type": "string", "pattern": None}),
    of_x({"type": "string", "enum": None}),
    of_x({"type": "string", "format": ["date"]}),
    of_x({"type": "string", "minLength": "3"}),
    of_x({"type": "string", "anyOf": {"const": "a"}}),
    of_x({"type": "string", "pattern": "a", "x-guidance": {}}),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("schema", [*COSTLY, *MALFORMED], ids=lambda schema: str(schema)[:60])
def test_a_schema_becomes_one_error_or_a_small_grammar(tokenizer: Tokenizer, name: str, schema: dict[str, Any]) -> None:
    """Formats whose values are JSON leave the rest of a schema to the compiler."""
    try:
        found = forced(tokenizer, name, schema)
    except InvalidRequestError:
        return
    assert len(found.grammar.text) < 1 << 16


@pytest.mark.parametrize("schema", [*COSTLY[:4], *MALFORMED], ids=lambda schema: str(schema)[:60])
def test_such_a_schema_is_refused_by_formats_with_tags(tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        forced(tokenizer, "qwen3_coder", schema)


@pytest.mark.parametrize("name", FORMATS)
def test_keywords_without_effect_are_taken(tokenizer: Tokenizer, vocabulary: LLTokenizer, name: str) -> None:
    schema = of_x({"type": "integer"}) | {"nullable": True, "minProperties": 0, "x-order": 3}
    new_matcher(forced(tokenizer, name, schema).grammar, vocabulary, StructuredConfig())


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [(r"^a\\/b$", "a\\/b", "a/b"), (r"^a\/b$", "a/b", "a\\/b"), (r"^x\\$", "x\\", "x$"), (r"^x\$", "x$y", "x")],
)
def test_patterns_with_slashes_and_dollars_are_theirs(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, name: str, pattern: str, text: str, other: str
) -> None:
    grammar = forced(tokenizer, name, of_x({"type": "string", "pattern": pattern})).grammar
    beginning = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\n",
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="true">',
    }[name]
    ending = {"qwen3_coder": "\n</parameter>", "deepseek_v32": "</｜DSML｜parameter>"}[name]
    for value, is_taken in ((text, True), (other, False)):
        matcher = new_matcher(grammar, vocabulary, StructuredConfig())
        tokens = tokenizer.encode(f"{beginning}{value}{ending}", add_special_tokens=False)
        assert (matcher.validate_tokens(tokens) == len(tokens)) is is_taken, value


def text_strings(count: int) -> dict[str, Any]:
    return {f"field_{i}": {"type": "string"} for i in range(count)}


@pytest.mark.parametrize(
    ("name", "count"),
    [*((name, 200) for name in (*FORMATS, "hermes")), pytest.param("hermes", 990, marks=pytest.mark.slow)],
)
def test_many_optional_parameters_are_followed(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, name: str, count: int
) -> None:
    """Each token is one that the mask allows, the last of them: the text goes through names and values of parameters."""
    schema = {"type": "object", "properties": text_strings(count), "additionalProperties": False}
    matcher = new_matcher(forced(tokenizer, name, schema).grammar, vocabulary, StructuredConfig())
    begun = len(matcher.compute_ff_tokens())
    for _ in range(begun + 6):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        assert matcher.consume_token(int(allowed[-1])) and not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize(
    ("wide", "count"),
    [
        ({"type": "object", "properties": text_strings(1000)}, 1002),
        ({"anyOf": [{"type": "object", "properties": text_strings(10)}] * 100}, 1200),
        ({"allOf": [{"$ref": "#/$defs/a"}], "properties": text_strings(400)}, 1004),
        ({"type": "object", "properties": text_strings(60), "minProperties": 1}, 1202),
        ({"type": "object", "patternProperties": {f"^{i}$": {} for i in range(1000)}}, 1002),
    ],
)
def test_a_schema_that_is_too_wide_is_refused_with_its_place(
    tokenizer: Tokenizer, wide: dict[str, Any], count: int
) -> None:
    schema = of_x(wide, a={"type": "object", "properties": text_strings(600)})
    with pytest.raises(InvalidRequestError) as caught:
        forced(tokenizer, "hermes", schema)
    assert str(caught.value).startswith(
        "Invalid value for 'tools[0].function.parameters': '#/properties/x': at most 1000 "
    )
    assert str(caught.value).endswith(f"at one place, got {count}.")


def test_parameters_that_are_required_are_not_wide(tokenizer: Tokenizer) -> None:
    """One that is required ends a run of others: what may come next ends with it."""
    names = text_strings(1600)
    schema = {"type": "object", "properties": names, "required": [*names][::2]}
    assert len(forced(tokenizer, "hermes", schema).grammar.text) > 1 << 14
    tagged = [
        {"type": "object", "properties": {"kind": {"const": str(i)}, **text_strings(32)}, "required": ["kind"]}
        for i in range(45)
    ]
    assert forced(tokenizer, "hermes", of_x({"type": "array", "items": {"anyOf": tagged}}))
    recursive = of_x({"anyOf": [A]}, a={"anyOf": [A, {"type": "null"}]})
    assert forced(tokenizer, "hermes", recursive)


def test_unbalanced_parentheses_do_not_leave_their_pattern(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = forced(tokenizer, "qwen3_coder", of_x({"type": "string", "pattern": r"^a)\\/)) # "})).grammar
    with pytest.raises(ValueError, match=r"unopened group|unbalanced|regex|parse"):
        new_matcher(grammar, vocabulary, StructuredConfig())


def test_an_enum_may_have_any_character(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = forced(tokenizer, "qwen3_coder", of_x({"type": "string", "enum": ['a\x7f\x01/\\"b']})).grammar
    new_matcher(grammar, vocabulary, StructuredConfig())


def test_parameters_have_the_definitions_that_they_refer_to(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    definitions: dict[str, Any] = {f"d{i}": {"type": "object", "description": "long " * 80} for i in range(14)}
    definitions["d0"] |= {"properties": {"next": {"$ref": "#/$defs/d1"}}}
    schema = of_x({"$ref": "#/$defs/d0"}, **definitions)
    schema["properties"] |= {f"y{i}": {"type": "integer", "maximum": i} for i in range(14)}
    named = forced(tokenizer, "qwen3_coder", schema)
    assert "d0" in named.grammar.text and "d1" in named.grammar.text and '"d2' not in named.grammar.text
    assert len(named.grammar.text) < 5000
    new_matcher(named.grammar, vocabulary, StructuredConfig())
