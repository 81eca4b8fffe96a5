"""Structured output, whole: request fields, the process that checks grammars, the engine's masks, and what clients read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from jaxserve.structured.protocol import MODULE
from tests.e2e.http_server import Server, running
from tests.processes import frozen

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "How many?"}]
JSON: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
SLOW = {"type": "integer", "multipleOf": 999_983}
"""Takes half a minute to compile."""
AMBIGUOUS = {"grammar": 'start: s s s s\ns: s s | s s s | /[a-z]/ | ""'}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    fake = {"vocab_size": 389, "num_blocks": 2048, "max_decode_steps": 4}
    with running(fake, structured={"grammar_timeout": 0.5}) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def check(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"size", "count"}
    assert value["size"] in ("small", "large")
    assert 0 <= value["count"] <= 99
    assert " " not in text, "JSON is compact"


@pytest.mark.parametrize("seed", range(4))
def test_every_choice_is_held_to_the_schema_streamed_or_not(client: openai.OpenAI, seed: int) -> None:
    options: Any = {"model": "tiny", "prompt": "x", "seed": seed, "n": 2, "max_tokens": 60}
    fields = {"response_format": JSON, "return_token_ids": True}
    plain: Any = client.completions.create(**options, extra_body=fields)
    texts, ids = ["", ""], [list[int](), list[int]()]
    for chunk in client.completions.create(**options, extra_body=fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += getattr(choice, "token_ids", ())
    assert texts == [choice.text for choice in plain.choices]
    assert ids == [choice.token_ids for choice in plain.choices]
    assert sum(map(len, ids)) == plain.usage.completion_tokens, "jump-forward tokens are returned too"
    for choice in plain.choices:
        assert choice.finish_reason == "stop"
        check(choice.text)


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"regex": "[ab]{3,5}-\\d+x"}, r"[ab]{3,5}-\d+x"),
        ({"choice": ["yes", 'no "really"', "née"]}, 'yes|no "really"|née'),
        ({"grammar": 'start: word ("," word)*\nword: /[a-c]{1,2}/'}, "[a-c]{1,2}(,[a-c]{1,2})*"),
        ({"json": json.dumps({"const": "é"})}, '"é"'),
        ({"json_object": True}, r"(?s)\{.*"),
    ],
)
def test_structured_outputs_of_every_kind(client: openai.OpenAI, field: Any, pattern: str) -> None:
    body = {"structured_outputs": field}
    reply = client.completions.create(model="tiny", prompt="x", seed=1, max_tokens=300, extra_body=body).choices[0]
    assert re.fullmatch(pattern, reply.text), reply.text
    if "json_object" not in field and "grammar" not in field:
        assert reply.finish_reason == "stop"


def test_neighbours_without_a_grammar_get_the_same_text(client: openai.OpenAI) -> None:
    def ask(extra: Any) -> str:
        options: Any = {"model": "tiny", "prompt": "y", "seed": 5, "max_tokens": 80}
        text: str = client.completions.create(**options, extra_body={"ignore_eos": True, **extra}).choices[0].text
        return text

    alone = ask({})
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(ask, [{"response_format": JSON}, {}] * 3))
    assert texts[1::2] == [alone] * 3
    for text in texts[::2]:
        check(text)


def test_ids_the_request_allows_bound_the_grammar(client: openai.OpenAI, server: Server) -> None:
    ids = json.loads(server.request("POST", "/tokenize", {"prompt": "ab"})[2])["tokens"]
    body = {"structured_outputs": {"regex": "[a-c]{4}"}, "allowed_token_ids": ids}
    text = client.completions.create(model="tiny", prompt="x", max_tokens=9, extra_body=body).choices[0].text
    assert re.fullmatch("[ab]{4}", text)
    body = {"structured_outputs": {"regex": "[c-d]{4}"}, "allowed_token_ids": ids}
    with pytest.raises(openai.BadRequestError, match="the request allows none"):
        client.completions.create(model="tiny", prompt="x", max_tokens=9, extra_body=body)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, None, "not"),
        ({"structured_outputs": {"json": {"$ref": "http://example.com/a"}}}, None, "example.com"),
        ({"structured_outputs": {"json": {"uniqueItems": True, "type": "array"}}}, None, "uniqueItems"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, None, ""),
        ({"structured_outputs": {"json": SLOW}}, "structured_outputs.json", "more than 0.5 s"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs.grammar", "nobody"),
        ({"structured_outputs": {"grammar": "start: " + "(" * 20_000}}, "structured_outputs.grammar", ""),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "65536 bytes"),
    ],
)
def test_what_cannot_be_enforced_is_refused(server: Server, fields: Any, param: str | None, reason: str) -> None:
    status, _, body = server.request("POST", "/v1/completions", {"model": "tiny", "prompt": "x", **fields})
    error = json.loads(body)["error"]
    assert status == 400, error
    assert reason in error["message"]
    assert param is None or error["param"] == param


@pytest.mark.slow
def test_requests_are_answered_while_hostile_grammars_are_checked(client: openai.OpenAI, server: Server) -> None:
    """First with the process that checks grammars stopped, then beside its checks and the engine's masks."""
    hostile: list[Any] = [{"json": SLOW}] * 4 + [AMBIGUOUS] * 2

    def attack(field: Any) -> int:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 60, "structured_outputs": field}
        return server.request("POST", "/v1/completions", body)[0]

    def ask() -> None:
        client.completions.create(model="tiny", prompt="x", max_tokens=1)

    attack({"regex": "[ab]{3}"})  # the first one starts that process
    with ThreadPoolExecutor(len(hostile)) as pool:
        with frozen(server.child_pid(MODULE)):
            attacks = [pool.submit(attack, field) for field in hostile]
            for _ in range(20):
                ask()
            assert not any(each.done() for each in attacks)
        num_answered = 0
        while not all(each.done() for each in attacks):
            ask()
            num_answered += 1
    assert [each.result() for each in attacks[:4]] == [400] * 4
    assert {each.result() for each in attacks[4:]} <= {200, 400}
    assert num_answered > 10 * len(hostile), "about one per check if they waited; it was 800"
