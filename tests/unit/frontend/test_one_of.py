"""`oneOf` is followed in every format of calls if no value can match two of its schemas, and refused otherwise."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from llguidance import LLTokenizer

from jaxserve.config import StructuredConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.grammars.one_of import without_one_of
from jaxserve.structured.check_process import checked
from jaxserve.structured.compiling import ll_tokenizer
from jaxserve.structured.protocol import OVERLAPPING_ONE_OF
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.frontend.parsers.test_hostile_schemas import FORMATS, forced, of_x
from tests.unit.frontend.parsers.test_written_calls import TOKENIZERS

PAGE, DATABASE = (
    {"type": "object", "properties": {name: {"type": "string"}}, "required": [name], "additionalProperties": False}
    for name in ("page", "database")
)
KINDS = [
    {"type": "object", "properties": {"kind": {"enum": [kind]}, "size": {"type": "integer"}}, "required": ["kind"]}
    for kind in ("circle", "square")
]
EXCLUSIVE: dict[str, list[Any]] = {
    "types": [{"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}],
    "values": [{"const": "a", "title": "A"}, {"const": "b"}, {"enum": ["c", "d"]}],
    "values of several types": [{"const": 1}, {"const": "1"}, {"enum": [2, None]}],
    "a property with different values": KINDS,
    "a property that the other one excludes": [PAGE, DATABASE],
    "references": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
    "alternatives of alternatives": [{"anyOf": [{"type": "null"}, PAGE]}, DATABASE],
}
OVERLAPPING: dict[str, list[Any]] = {
    "integers are numbers": [{"type": "integer"}, {"type": "number"}],
    "a value twice": [{"const": "a"}, {"enum": ["a", "b"]}],
    "equal numbers": [{"const": 1}, {"const": 1.0}],
    "strings": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "a"}],
    "a property that is optional": [{**kind, "required": []} for kind in KINDS],
    "objects of any type": [{"required": ["a"]}, {"required": ["b"]}],
    "open objects": [{**PAGE, "additionalProperties": True}, {**DATABASE, "additionalProperties": True}],
    "a reference to itself": [{"$ref": "#/$defs/Loop"}, {"type": "null"}],
}
DEFINITIONS = {"Circle": KINDS[0], "Square": KINDS[1], "Loop": {"$ref": "#/$defs/Loop"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TOKENIZERS / "byte_level")


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return ll_tokenizer(tokenizer)


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_alternatives_that_exclude_each_other_are_any_of(name: str) -> None:
    schema = of_x({"oneOf": EXCLUSIVE[name]}, **DEFINITIONS)
    assert without_one_of(deepcopy(schema)) == of_x({"anyOf": EXCLUSIVE[name]}, **DEFINITIONS)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_alternatives_that_may_match_together_stay(name: str) -> None:
    schema = of_x({"oneOf": OVERLAPPING[name]}, **DEFINITIONS)
    assert without_one_of(deepcopy(schema)) == schema


def test_comparisons_are_bounded() -> None:
    many = [{"type": "object", "properties": {"a": {"minimum": i}}, "required": ["a"]} for i in range(1000)]
    assert "oneOf" in without_one_of({"oneOf": many})
    tagged = [{"const": f"value {i}"} for i in range(1000)]
    assert "anyOf" in without_one_of({"oneOf": tagged})


def union(count: int, num_others: int, tag: Any = None) -> list[Any]:
    """Return objects of which each requires other properties, then one with its own text, or `tag`."""
    others = {f"other{i}": {"type": "string"} for i in range(num_others)}
    kinds = [{"const": f"kind {i}"} if tag is None else tag for i in range(count)]
    required = [*others, "kind"]
    return [{"type": "object", "properties": {**others, "kind": kind}, "required": required} for kind in kinds]


@pytest.mark.parametrize("required", [{"kind": 1}, 5, True, "kind", [["kind"]], None])
def test_malformed_lists_of_required_properties_tell_nothing(required: Any) -> None:
    assert "oneOf" in without_one_of({"oneOf": [{**kind, "required": required} for kind in KINDS]})


def test_large_unions_exclude_each_other_by_their_tags() -> None:
    assert "anyOf" in without_one_of({"oneOf": union(500, 12)}, 100)
    mixed = [*union(60, 3), {"type": "null"}]
    assert "anyOf" in without_one_of({"oneOf": mixed})
    for tag in (True, {}, {"type": "string"}, {"enum": ["a", "b"]}):
        assert "oneOf" in without_one_of({"oneOf": union(3, 1, tag)})


@pytest.mark.parametrize("name", [*FORMATS, "hermes"])
def test_every_format_follows_or_refuses_them(tokenizer: Tokenizer, vocabulary: LLTokenizer, name: str) -> None:
    followed = forced(tokenizer, name, of_x({"oneOf": EXCLUSIVE["values"]}))
    assert checked(followed.grammar, vocabulary, StructuredConfig()).error is None
    assert OVERLAPPING_ONE_OF in refusal(tokenizer, vocabulary, name, of_x({"oneOf": OVERLAPPING["a value twice"]}))


def refusal(tokenizer: Tokenizer, vocabulary: LLTokenizer, name: str, schema: dict[str, Any]) -> str:
    """Return why a schema is refused: when its grammar is made, or when that is checked."""
    try:
        named = forced(tokenizer, name, schema)
    except InvalidRequestError as error:
        return str(error)
    return str(checked(named.grammar, vocabulary, StructuredConfig()).error)
