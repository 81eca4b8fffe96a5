"""Requests as other people's clients send them: each was refused, or answered wrongly, once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from llguidance import LLTokenizer

from jaxserve.apis.anthropic.schema import MessagesRequest
from jaxserve.apis.anthropic.to_request import to_request as messages_request
from jaxserve.apis.openai import chat, completions
from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.apis.openai.completions_schema import CompletionRequest
from jaxserve.apis.schema.decode import decode_request
from jaxserve.config import LimitsConfig, StructuredConfig
from jaxserve.errors import InvalidRequestError, invalid
from jaxserve.frontend import grammar
from jaxserve.frontend.constraints import Constraint
from jaxserve.frontend.grammar import check_size, constraint_grammar
from jaxserve.frontend.json_schema import intended_schema
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.sampling import sampling_params
from jaxserve.http.paths import likely_path
from jaxserve.http.rejections import RejectionLog
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.check_process import checked, converted
from jaxserve.structured.compiling import Vocabulary, ll_tokenizer, new_matcher
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.unit.apis.test_replies import EOS, play
from tests.unit.running_api import TOKENIZERS, Api, running_api

CHAT = "/v1/chat/completions"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    """A server whose model does not reason, with a template without switches."""
    async with running_api(tokenizer, output_format=OutputFormat(), max_model_len=2000) as running:
        yield running


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return ll_tokenizer(load_tokenizer(TOKENIZERS / "byte_level"))


async def answered(api: Api, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The reply to a request that is served, and the fields that its header says had no effect."""

    async def post() -> tuple[dict[str, Any], list[str]]:
        async with api.http.post(path, json=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
            names = response.headers.get("x-jaxserve-ignored", "")
            return reply, names.split(",") if names else []

    found: tuple[dict[str, Any], list[str]]
    found, _ = await asyncio.gather(
        post(), play(api, [[*api.tokenizer.encode("Hello", False), EOS]], finish_reason="stop")
    )
    return found


def chat_constraint(**fields: Any) -> Constraint | None:
    request, ignored = decode_request(ChatRequest, msgspec.json.encode({"messages": HI} | fields))
    assert ignored == []
    return chat.to_request(request, LimitsConfig()).constraint


def follows(vocabulary: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    """Return True if the text is a whole reply to a request with this schema."""
    grammar = constraint_grammar(Constraint("json", schema, "response_format"), 64).grammar
    assert checked(grammar, vocabulary, StructuredConfig()).error is None
    matcher = new_matcher(grammar, vocabulary, StructuredConfig())
    ids = Vocabulary(load_tokenizer(TOKENIZERS / "byte_level"))(text.encode())
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


# 1: plain pydantic schemas


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (CITY, '{"city":"x"}', '{"city":"x","b":1}'),
        (CITY | {"additionalProperties": True}, '{"city":"x","b":1}', "{}"),
        (
            {"type": "array", "items": {"$ref": "#/$defs/City"}, "$defs": {"City": CITY}},
            '[{"city":"x"}]',
            '[{"city":"x","b":1}]',
        ),
        ({"anyOf": [CITY, {"type": "null"}]}, '{"city":"x"}', '{"city":"x","b":1}'),
        (
            {"allOf": [{"$ref": "#/$defs/City"}, {"properties": {"b": {"type": "integer"}}}], "$defs": {"City": CITY}},
            '{"city":"x","b":1}',
            '{"b":1}',
        ),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, '{"b":1}', "{}"),
        ({"type": "object"}, '{"any":1}', "[]"),
        ({"type": "object", "properties": {"a": {"const": {"properties": {}}}}}, '{"a":{"properties":{}}}', '{"b":1}'),
    ],
)
def test_an_object_has_the_properties_that_its_schema_lists(
    vocabulary: LLTokenizer, schema: dict[str, Any], right: str, wrong: str
) -> None:
    assert follows(vocabulary, schema, right)
    assert not follows(vocabulary, schema, wrong)


def test_a_cyclic_schema_of_combined_parts_is_read_once() -> None:
    schema = {"allOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a", "properties": {}}}}
    assert intended_schema(schema, "p") == schema


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {}, "required": [[], {}, 1]},
        {"properties": 3, "allOf": 4, "items": [1], "$ref": 5},
        {"properties": {"a": True}, "minProperties": "x", "required": "a"},
        {"$ref": "#/$defs/~1/0", "$defs": [1], "properties": {}},
        {"anyOf": [None, []], "format": 3, "uniqueItems": "yes"},
    ],
)
def test_a_schema_that_is_none_reaches_the_compiler_unchanged(schema: dict[str, Any]) -> None:
    assert intended_schema(schema, "p") == schema


def test_a_schema_of_too_many_values_is_refused_before_it_is_read() -> None:
    with pytest.raises(InvalidRequestError, match=r"more than 131072 values"):
        constraint_grammar(Constraint("json", {"enum": [0] * 140_000}, "guided_json"), 64)


@pytest.mark.parametrize("depth", [65, 20_000])
def test_a_schema_that_is_nested_too_deeply_names_the_limit(depth: int) -> None:
    """The text of a schema may be deeper than any decoder goes."""
    text = '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)
    with pytest.raises(InvalidRequestError, match=r"nested deeper than 64 \(--max-grammar-depth\)"):
        constraint_grammar(Constraint("json", text, "guided_json"), 64)
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"a": schema}
    with pytest.raises(InvalidRequestError, match=r"nested deeper than 64 \(--max-grammar-depth\)"):
        constraint_grammar(Constraint("json", schema, "guided_json"), 64)
    constraint_grammar(Constraint("json", '{"a":' * 63 + "{}" + "}" * 63, "guided_json"), 64)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("grammar", "\n" * 65_537),
        ("regex", "a" * 65_537),
        ("choice", ["a" * 40_000, "b" * 40_000]),
        ("json", " " * (1 << 20) + "{}"),
        ("json", {"const": "a" * (1 << 21)}),
        ("json", {"properties": {"a" * (1 << 21): {}}}),
    ],
)
def test_a_constraint_of_too_many_bytes_is_refused_before_it_is_read(kind: Any, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"at most 65536 bytes \(--max-grammar-size\), got") as raised:
        check_size(Constraint(kind, value, "p"), StructuredConfig().max_grammar_size)
    assert raised.value.param == "p"
    fine = {"grammar": "\n" * 65_536, "choice": ["a" * 60_000], "json": {"const": "a" * 60_000}}.get(kind, "a")
    check_size(Constraint(kind, fine, "p"), StructuredConfig().max_grammar_size)


async def test_a_large_grammar_is_searched_by_nothing(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(constraint: Constraint, max_depth: int) -> None:
        raise AssertionError("a search of 4 MB takes a quarter of a second")

    monkeypatch.setattr(grammar, "constraint_grammar", search)
    async with running_api(tokenizer, max_body_size=100_000) as api:
        status, reply = await api.post(CHAT, {"messages": HI, "guided_grammar": "a" * 70_000})
    assert (status, reply["error"]["param"]) == (400, "guided_grammar")


# 2, 3, 6: reasoning switches, and Anthropic's replies

CLAUDE_CODE = {
    "model": "tiny",
    "max_tokens": 5,
    "messages": HI,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "user_1"},
}


async def test_what_claude_code_sends_unasked_is_named_and_has_no_effect(api: Api) -> None:
    reply, ignored = await answered(api, "/v1/messages", CLAUDE_CODE)
    assert reply["content"] == [{"type": "text", "text": "Hello"}]  # no `citations`, which the AI SDK checks
    assert sorted(ignored) == [
        "context_management",
        "output_config.effort",
        "thinking.budget_tokens",
        "thinking.type",
    ]


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"reasoning_effort": "none"}, []),
        (CHAT, {"thinking": {"type": "disabled"}}, []),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, ["thinking", "thinking.budget_tokens"]),
        (CHAT, {"thinking_token_budget": 9}, ["thinking_token_budget"]),
        (CHAT, {"reasoning_effort": "low"}, ["reasoning_effort"]),
        (CHAT, {"reasoning_effort": "max"}, ["reasoning_effort"]),
        ("/v1/completions", {"reasoning_effort": "none", "thinking": {"type": "disabled"}}, []),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, []),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, ["reasoning.effort"]),
        ("/v1/responses", {"reasoning": {"effort": "max", "mode": "pro"}}, ["reasoning.mode", "reasoning.effort"]),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "max_tokens": 5}, []),
    ],
)
async def test_a_switch_of_reasoning_is_harmless_to_a_model_that_does_not_reason(
    api: Api, path: str, fields: dict[str, Any], ignored: list[str]
) -> None:
    prompt = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(path, {"messages": HI})
    assert (await answered(api, path, {**prompt, **fields}))[1] == ignored


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
    ],
)
async def test_a_wrong_budget_of_reasoning_is_named_as_it_was_sent(
    api: Api, fields: dict[str, Any], param: str
) -> None:
    status, reply = await api.post(CHAT, {"messages": HI, **fields})
    assert (status, reply["error"]["param"]) == (400, param)


# 4: Codex


async def test_a_choice_among_no_tools_is_fine_unless_it_forces_a_call(api: Api) -> None:
    codex = {"model": "tiny", "input": "Hi", "tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
    await answered(api, "/v1/responses", codex)
    await answered(api, "/v1/responses", codex | {"tool_choice": "none"})
    await answered(api, CHAT, {"messages": HI, "tools": [], "tool_choice": "auto"})
    for choice in ("required", {"type": "function", "name": "f"}):
        status, reply = await api.post("/v1/responses", codex | {"tool_choice": choice})
        assert (status, reply["error"]["param"]) == (400, "tool_choice")


# 5, 7: the many names of a constraint

VLLM_OUTPUTS: dict[str, Any] = {
    "json": None,
    "choice": None,
    "json_object": None,
    "disable_fallback": False,
    "disable_any_whitespace": True,
    "disable_additional_properties": True,
    "whitespace_pattern": None,
    "structural_tag": None,
}
"""vLLM's `StructuredOutputsParams` as a mapping, without what is asked for."""


@pytest.mark.parametrize(
    ("fields", "kind", "value", "param"),
    [
        ({"guided_json": CITY}, "json", CITY, "guided_json"),
        ({"guided_json": json.dumps(CITY)}, "json", json.dumps(CITY), "guided_json"),
        ({"guided_regex": "a+", "guided_decoding_backend": "xgrammar"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"], "guided_choice"),
        ({"guided_grammar": "start: A"}, "grammar", "start: A", "guided_grammar"),
        (
            {"structured_outputs": {"grammar": "g"}, "guided_grammar": "g", "guided_decoding_backend": "guidance"},
            "grammar",
            "g",
            "structured_outputs.grammar",
        ),
        (
            {"structured_outputs": {"json": CITY}, "guided_json": json.dumps(CITY)},
            "json",
            CITY,
            "structured_outputs.json",
        ),
        ({"structured_outputs": VLLM_OUTPUTS | {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"json_schema": CITY}, "json", CITY, "json_schema"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"', "ebnf"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"', "grammar"),
        ({"response_format": {"type": "json_object", "schema": CITY}}, "json", CITY, "response_format.schema"),
        ({"response_format": {"type": "json_object", "value": CITY}}, "json", CITY, "response_format.value"),
        ({"response_format": {"type": "json", "value": CITY}}, "json", CITY, "response_format.value"),
        ({"response_format": {"type": "json_schema", "schema": CITY}}, "json", CITY, "response_format.schema"),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, "regex", "a+", "response_format.pattern"),
        ({"response_format": {"type": "regex", "value": "a+"}}, "regex", "a+", "response_format.value"),
        ({"response_format": {"type": "grammar", "grammar": "g"}}, "grammar", "g", "response_format.grammar"),
    ],
)
def test_a_constraint_is_honoured_under_every_name(fields: dict[str, Any], kind: Any, value: Any, param: str) -> None:
    assert chat_constraint(**fields) == Constraint(kind, value, param)
    request, _ = decode_request(CompletionRequest, msgspec.json.encode({"prompt": "Hi"} | fields))
    assert completions.to_request(request, LimitsConfig()).constraint == Constraint(kind, value, param)


def test_names_of_other_servers_constrain_messages_too() -> None:
    request, _ = decode_request(MessagesRequest, msgspec.json.encode({"messages": HI, "max_tokens": 1, "regex": "a"}))
    assert messages_request(request, LimitsConfig()).constraint == Constraint("regex", "a", "regex")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        ({"structured_outputs": VLLM_OUTPUTS | {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": VLLM_OUTPUTS | {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"regex": "a", "json_schema": CITY}, "regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"response_format": {"type": "text", "schema": CITY}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "pattern": "a"}}, "response_format.pattern"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "regex", "pattern": "a", "value": "a"}}, "response_format.value"),
        ({"response_format": {"type": "json_schema", "value": "a"}}, "response_format.value"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_constraints_that_differ_or_lack_a_part_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        chat_constraint(**fields)
    assert refused.value.param == param


def test_what_asks_for_no_format_constrains_nothing() -> None:
    assert chat_constraint(guided_choice=[], guided_json="", guided_regex="", response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ('root ::= "yes" | "no" ws [0-9]+\nws ::= " "*', "no 12", "maybe"),
        ('# a comment\nroot ::= item ("," item)*\nitem ::= [a-z]', "a,b", "a,"),
    ],
)
def test_grammars_of_llama_cpp_are_followed(vocabulary: LLTokenizer, text: str, right: str, wrong: str) -> None:
    named = constraint_grammar(Constraint("grammar", text, "grammar"), 64).grammar
    assert named.kind == "gbnf"
    grammar, error = converted(named)
    assert (grammar.kind, error) == ("lark", None)
    assert checked(grammar, vocabulary, StructuredConfig()).error is None
    spell = Vocabulary(load_tokenizer(TOKENIZERS / "byte_level"))
    for reply, fits in ((right, True), (wrong, False)):
        matcher = new_matcher(grammar, vocabulary, StructuredConfig())
        ids = spell(reply.encode())
        assert (all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()) == fits


def test_the_format_of_a_grammar_is_found_in_one_pass() -> None:
    """With a quadratic search this text blocks the server for hours."""
    empty = " \n" * 1_000_000
    for text, kind in (('start: "a"', "lark"), ('root ::= "a"', "gbnf"), ('\t root::= "a"', "gbnf")):
        assert constraint_grammar(Constraint("grammar", empty + text, "grammar"), 64).grammar.kind == kind


@pytest.mark.parametrize("text", ['root ::= "a', 'x ::= "a"', "root ::= nobody", "root ::= " + "(" * 5000])
def test_a_broken_grammar_of_llama_cpp_says_why(text: str) -> None:
    _, error = converted(Grammar("gbnf", text))
    assert error is not None
    assert "GBNF" in error
    assert len(error) < 600


# 8: pydantic's annotations


def test_formats_that_json_schema_does_not_know_are_annotations(vocabulary: LLTokenizer) -> None:
    for name in ("path", "binary", "file-path", "password"):
        assert follows(vocabulary, {"type": "string", "format": name}, '"a/b"')
    assert not follows(vocabulary, {"type": "string", "format": "date"}, '"a/b"')
    few = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1}
    assert follows(vocabulary, few, "[1]")
    assert follows(vocabulary, {"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1,1]")


def test_what_cannot_be_enforced_says_how_to_go_on(vocabulary: LLTokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"a list instead of a set") as refused:
        intended_schema({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "guided_json")
    assert refused.value.param == "guided_json"
    looking = Grammar("json_schema", '{"type":"string","pattern":"^(?!a)b"}')
    error = checked(looking, vocabulary, StructuredConfig()).error
    assert error is not None
    assert "write it without" in error
    assert "\n" not in error
    endless = checked(Grammar("json_schema", '{"$ref":"#"}'), vocabulary, StructuredConfig()).error
    assert endless is not None
    assert endless.startswith("it allows no text at all")


@pytest.mark.parametrize(
    ("pattern", "fits", "fails"),
    [
        (r"^[a-z~~]+$", "a~", "&"),
        (r"^[a&&b]$", "&", "c"),
        (r"^[+--]$", ",", "."),
        (r"^[^--/&]$", "0", "."),
        (r"^[[\]a-]+$", "[a]-", "b"),
        (r"^\[[^]\]$", "[&]", "[&"),
        (r"^[]?[\w.%+-]+@[\d-]$", "a.b-%@-", "a@b"),
        (r"^[\s-.]+$", " -.", "/"),
        (r"^[\w-.]+[+-\d]$", "a-.-", "a,"),
        (r"^[\p{Lu}-.]+$", "É-.", "é"),
    ],
)
def test_classes_of_patterns_have_the_meaning_of_ecma_262(
    vocabulary: LLTokenizer, pattern: str, fits: str, fails: str
) -> None:
    tokenizer = Vocabulary(load_tokenizer(TOKENIZERS / "byte_level"))
    value = {"type": "string", "pattern": pattern}
    named = {
        "type": "object",
        "patternProperties": {pattern: {"const": 1}},
        "additionalProperties": False,
        "required": [],
    }
    for schema, texts in ((value, (f'"{fits}"', f'"{fails}"')), (named, (f'{{"{fits}":1}}', f'{{"{fails}":1}}'))):
        grammar = Grammar("json_schema", json.dumps(intended_schema(schema, "p")))
        matchers = [new_matcher(grammar, vocabulary, StructuredConfig()) for _ in texts]
        accepted = [
            all(map(matcher.consume_token, tokenizer(text.encode()))) and matcher.is_accepting()
            for matcher, text in zip(matchers, texts, strict=True)
        ]
        assert accepted == [True, False], schema


@pytest.mark.parametrize("part", ["[", "[\\a", "[^\\]"])
def test_classes_without_an_end_are_read_once(part: str) -> None:
    """Looking for the end from each beginning would take hours."""
    schema = {"type": "string", "pattern": part * 200_000}
    assert intended_schema(schema, "p") == schema


def test_counts_that_no_reply_reaches_are_no_bounds() -> None:
    schema = {"type": "string", "maxLength": (1 << 63) - 1, "maxItems": 1 << 70, "maxProperties": (1 << 32) - 1}
    assert intended_schema(schema, "p") == {"type": "string", "maxProperties": (1 << 32) - 1}


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_64_bits_and_beyond_are_enforced_as_far_as_there_are_numbers(
    vocabulary: LLTokenizer, kind: str
) -> None:
    for least, most in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(2**70), 2**70), (-1e308, 1e308)):
        schema = {"type": kind, "minimum": least, "maximum": most}
        assert follows(vocabulary, schema, "9007199254740993")
        assert not follows(vocabulary, schema, "99999999999999999999")
        assert follows(vocabulary, schema, "-3") == (least < 0)
    assert follows(vocabulary, {"type": kind, "exclusiveMinimum": -(2**63)}, "-1")
    for least in (10**18 - 1, 3 * 10**18):
        assert follows(vocabulary, {"type": kind, "minimum": least}, "3000000000000000001")
        assert not follows(vocabulary, {"type": kind, "minimum": least}, "7")
        assert follows(vocabulary, {"type": kind, "maximum": -least}, "-3000000000000000001")
    for name, bound in (("minimum", 2**63), ("exclusiveMinimum", 1e300), ("maximum", -(2**63))):
        with pytest.raises(InvalidRequestError, match=rf"{name}: no number of 64 bits is beyond"):
            intended_schema({"properties": {"a": {"type": kind, name: bound}}}, "guided_json")


@pytest.mark.parametrize("name", ["const", "enum"])
def test_listed_integers_that_would_be_rounded_are_refused(vocabulary: LLTokenizer, name: str) -> None:
    for value in (2**53 + 1, -(2**63), 10**30):
        listed: Any = {"id": [value]} if name == "const" else ["a", value]
        with pytest.raises(InvalidRequestError, match=rf"{name}: integers beyond 2\^53 .* got {value}"):
            intended_schema({"properties": {"a": {name: listed}}}, "guided_json")
    schema = intended_schema({name: 2**53 if name == "const" else [-(2**53)]}, "guided_json")
    assert follows(vocabulary, schema, "9007199254740992" if name == "const" else "-9007199254740992")


def test_bounds_between_floats_let_no_further_integer_pass(vocabulary: LLTokenizer) -> None:
    between = 2**53 + 1
    for name, outside, inside in (("minimum", -1, 1), ("maximum", 1, -1)):
        schema = intended_schema({"type": "integer", name: between}, "guided_json")
        assert not follows(vocabulary, schema, str(between + outside))
        assert follows(vocabulary, schema, str(between + inside))
    schema = intended_schema({"type": "integer", "minimum": between, "maximum": between}, "guided_json")
    alone = Grammar("json_schema", json.dumps(schema))
    assert "Unsatisfiable" in str(checked(alone, vocabulary, StructuredConfig()).error)


# 9: numbers


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0},
        {"top_logprobs": 0},
        {"best_of": 1},
        {"max_tokens": 16.0},
        {"n": 1.0, "seed": 3.0, "stop_token_ids": [4.0]},
        {"top_k": -1.0, "logit_bias": {"1": 2}},
    ],
)
def test_what_asks_for_nothing_or_has_one_meaning_passes(fields: dict[str, Any]) -> None:
    request, ignored = decode_request(ChatRequest, msgspec.json.encode({"messages": HI} | fields))
    assert ignored == []
    translated = chat.to_request(request, LimitsConfig())
    sampling_params(translated.sampling, {}, max_tokens=9, seed=0, num_top_logprobs=None, vocab_size=10)


@pytest.mark.parametrize("fields", [{"temperature": "0.7"}, {"max_tokens": "16"}, {"max_tokens": 16.5}])
def test_texts_and_fractions_are_no_integers(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        decode_request(ChatRequest, msgspec.json.encode({"messages": HI} | fields))
    assert refused.value.param == next(iter(fields))


# 10: the log


async def test_a_refused_request_leaves_a_line_in_the_log(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxserve")
    await api.post(CHAT, {"messages": HI, "n": 0})
    await api.post("/nowhere", {})
    lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert lines[0].startswith(f"refused: POST {CHAT} 400 param=n: Invalid value for 'n'")
    assert lines[1].startswith("refused: POST an unknown path 404 param=-: Unknown request URL")


def test_the_log_of_refused_requests_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxserve")
    now = [0.0]
    log = RejectionLog(lambda: now[0])
    for _ in range(100):
        log.note("POST /x", 400, invalid("a", "no"))
    assert len(caplog.records) == 10
    now[0] = 61.0
    log.note("POST /x", 400, invalid("a", "no"))
    assert "(90 refused requests before this one are not shown)" in caplog.records[-1].getMessage()


# 11, 12: browsers and keys


async def test_a_refused_preflight_names_the_flag(api: Api) -> None:
    headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    async with api.http.options(CHAT, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (403, "origin_not_allowed")
    assert "--cors-allowed-origins http://localhost:3000" in error["message"]


async def test_a_local_server_without_keys_has_no_other_name(tokenizer: Tokenizer) -> None:
    """A page whose name resolves to 127.0.0.1 could read every reply."""
    async with running_api(tokenizer, is_local=True) as api:
        for name, status in (
            ("evil.example:8000", 403),
            ("localhost:8000", 200),
            ("[::1]:8000", 200),
            ("127.0.0.1", 200),
        ):
            async with api.http.get("/v1/models", headers={"Host": name}) as response:
                assert response.status == status, name
        async with api.http.get("/health", headers={"Host": "evil.example"}) as response:
            assert response.status == 200, "probes may use any name"
    for options in ({"api_key": "secret", "is_local": True}, {"is_local": False}):
        async with running_api(tokenizer, **options) as api:  # type: ignore[arg-type]
            headers = {"Host": "gpu-7.example", "Authorization": "Bearer secret"}
            async with api.http.get("/v1/models", headers=headers) as response:
                assert response.status == 200


async def test_the_header_of_azure_carries_the_key(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, api_key="secret") as api:
        for value, status in (("secret", 200), ("wrong", 401)):
            async with api.http.get("/v1/models", headers={"api-key": value}) as response:
                assert response.status == status


# 13: misspelt paths


async def test_a_slash_at_the_end_is_served(api: Api) -> None:
    async with api.http.get("/v1/models/") as response:
        assert response.status == 200
    await answered(api, f"{CHAT}/", {"messages": HI})


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/chat/completions", CHAT),
        ("/openai/v1/chat/completions", CHAT),
        ("/v1/v1/v1/messages/", "/v1/messages"),
        ("/v1/chat/completion", CHAT),
        ("/v1/chat/competions", CHAT),
        ("/v1/chat", None),
        ("/", None),
        ("/" * 300, None),
    ],
)
async def test_an_unknown_path_names_the_likely_one(api: Api, path: str, meant: str | None) -> None:
    from jaxserve.http.app import collect_routes

    assert likely_path(path, collect_routes()) == meant
    if meant == CHAT and not path.startswith("//"):
        status, reply = await api.post(path, {})
        assert (status, reply["error"]["message"]) == (404, f"Unknown request URL: POST {path}. Did you mean {meant}?")


async def test_an_unknown_path_below_messages_answers_as_anthropic_does(api: Api) -> None:
    for path in ("/v1/messages/batches", "/v1/messages/count"):
        status, reply = await api.post(path, {})
        assert (status, reply["type"], reply["error"]["type"]) == (404, "error", "not_found_error")
    status, reply = await api.post("/v1/messagesx", {})
    assert (status, set(reply)) == (404, {"error"})
