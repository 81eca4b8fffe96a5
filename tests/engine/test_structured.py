"""A real model with grammars: every finished reply fits, and other requests get the same tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxserve.ipc.messages import AddRequest, Grammar
from jaxserve.structured.compiling import ll_tokenizer
from jaxserve.structured.masks import GrammarMasks
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.engine.model_engine import Generated, ModelEngine, request, smollm2_engine
from tests.unit.checkpoint.checkpoint_files import smollm2_file

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
POINTS: dict[str, Any] = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"x": {"type": "boolean"}, "y": {"type": ["null", "boolean"]}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("json_schema", json.dumps(POINTS)),
    Grammar("regex", r"[A-Z][a-z]{2,8}( [a-z]{1,6}){2}\."),
    Grammar("lark", 'start: "été" | "hiver: " /[0-9]{2}/'),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(smollm2_file())


@pytest.fixture(scope="module")
def smollm2() -> Iterator[ModelEngine]:
    engine = smollm2_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def masks(smollm2: ModelEngine, tokenizer: Tokenizer) -> Iterator[GrammarMasks]:
    vocabulary = ll_tokenizer(tokenizer)
    made = GrammarMasks(lambda: vocabulary, smollm2.executor.model_info.vocab_size, smollm2.config.structured)
    yield made
    made.close()


def held(tokenizer: Tokenizer, name: str, grammar: Grammar, **sampling: Any) -> AddRequest:
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Answer in the given form."}])
    options = {"ignore_eos": False, "max_tokens": 100, **sampling}
    return msgspec.structs.replace(request(name, prompt, **options), grammar=grammar)


def check(tokenizer: Tokenizer, grammar: Grammar, result: Generated) -> None:
    text = tokenizer.decode(result.token_ids)
    assert result.finish_reason == "stop", text
    match grammar.kind:
        case "regex":
            assert re.fullmatch(grammar.text, text), text
        case "lark":
            assert re.fullmatch("été|hiver: [0-9]{2}", text), text
        case "json_schema":
            value = json.loads(text)
            if isinstance(value, dict):
                assert list(value) == ["name", "age", "tags"]
                assert len(value["name"]) <= 20
                assert 0 <= value["age"] <= 150
                assert set(value["tags"]) <= {"a", "b"}
            else:
                assert 2 <= len(value) <= 3
                assert all(point.keys() == {"x", "y"} and point["x"] in (True, False) for point in value)


def requests(tokenizer: Tokenizer) -> list[AddRequest]:
    return [
        held(tokenizer, f"{i}-{temperature}", grammar, temperature=temperature, seed=i, **more)
        for temperature, more in [(0.0, {}), (1.0, {"top_p": 0.9}), (2.0, {"frequency_penalty": 1.0, "min_tokens": 3})]
        for i, grammar in enumerate(GRAMMARS)
    ]


def test_every_reply_fits_and_neighbours_are_left_alone(
    smollm2: ModelEngine, tokenizer: Tokenizer, masks: GrammarMasks
) -> None:
    free = [request(f"free{i}", [5, 6, 7, i], temperature=1.0, seed=i) for i in range(3)]
    smollm2.restart()
    alone = smollm2.run(free)
    before = smollm2.executor.compilations()
    smollm2.restart(grammars=masks)
    constrained = requests(tokenizer)
    together = smollm2.run([*constrained[:6], *free, *constrained[6:]])
    for item in constrained:
        assert item.grammar is not None
        check(tokenizer, item.grammar, together[item.request_id])
    for item in free:
        assert together[item.request_id].token_ids == alone[item.request_id].token_ids
    assert smollm2.executor.compilations() == before


def test_overlap_changes_no_token(smollm2: ModelEngine, tokenizer: Tokenizer, masks: GrammarMasks) -> None:
    smollm2.restart(grammars=masks, overlap=False)
    expected = smollm2.run(requests(tokenizer))
    smollm2.restart(grammars=masks)
    found = smollm2.run(requests(tokenizer))
    assert {name: result.token_ids for name, result in found.items()} == {
        name: result.token_ids for name, result in expected.items()
    }
