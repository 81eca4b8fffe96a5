"""Bodies of many values are counted in parts before they are decoded, and refused beyond --max-body-values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.apis.openai.completions_schema import CompletionRequest
from jaxserve.apis.openai.embeddings import EmbeddingRequest
from jaxserve.apis.schema import decode, large_bodies
from jaxserve.apis.schema.decode import decode_request, may_exceed
from jaxserve.apis.schema.large_bodies import count_values
from jaxserve.errors import InvalidRequestError

MOST = 1000
NO_LIMIT = 1 << 40
TEXTS = st.text(alphabet='a",:[]{}\\tfn\né', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
AT_ANY_SPEED = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
HI = [{"role": "user", "content": "Hi"}]


def numbers_of(value: Any) -> tuple[int, int, int, int]:
    """Values, empty containers, containers and keys, counted in the decoded value."""
    if not isinstance(value, list | dict):
        return 1, 0, 0, 0
    children = [numbers_of(child) for child in (value.values() if isinstance(value, dict) else value)]
    own = (1, not value, 1, len(value) if isinstance(value, dict) else 0)
    return tuple(map(sum, zip(own, *children, strict=True)))  # type: ignore[return-value]


@AT_ANY_SPEED
@given(VALUES, st.integers(2, 9), st.booleans())
def test_parts_count_what_the_decoded_value_has(value: Any, part_bytes: int, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    values, empty, containers, keys = numbers_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "PART_BYTES", part_bytes)
        counts = count_values(text, NO_LIMIT)
    assert (counts.containers, counts.keys) == (containers, keys)
    assert counts.all == values + empty  # a container that is empty has no first value
    assert may_exceed(len(text), values - 1)  # no text that is too short to be counted has more


@AT_ANY_SPEED
@given(st.binary(max_size=60) | st.text(alphabet='\\"[,a', max_size=60).map(str.encode), st.integers(2, 5))
def test_counting_ends_for_any_bytes(body: bytes, part_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "PART_BYTES", part_bytes)
        assert count_values(body, NO_LIMIT).all >= 1


def test_counting_stops_at_the_part_with_too_many() -> None:
    class Body(bytes):
        parts = 0

        def __getitem__(self, key: Any) -> Any:
            Body.parts += 1
            return super().__getitem__(key)

    for body in (b"[" + b"{}," * 999_999 + b"{}]", b"{" + b'"a":1,' * 499_999 + b'"a":1}'):
        Body.parts = 0
        assert count_values(Body(body), MOST).exceed(MOST)
        assert Body.parts == 1
    assert not count_values(b"[" + b"1," * 999_999 + b"1]", MOST).exceed(MOST)


@pytest.mark.parametrize(
    ("struct", "fields"),
    [
        (ChatRequest, {"messages": HI * 400}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 400}]}),
        (ChatRequest, {"messages": HI, "stop": ["a"] * 1001}),
        (ChatRequest, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}] * 300}),
        (ChatRequest, {"messages": HI, "chat_template_kwargs": {"a": [0] * 1001}}),
        (ChatRequest, {"messages": HI, "unknown": [[]] * 1001}),
        (ChatRequest, {"messages": HI, "x": {str(i): 0 for i in range(1001)}}),
        (ChatRequest, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"a": [1] * 1001}}}),
        (CompletionRequest, {"prompt": ["a"] * 1001}),
        (CompletionRequest, {"prompt": [[1]] * 1001}),
        (CompletionRequest, {"prompt": [1] * 2000 + [True]}),
        (CompletionRequest, {"prompt": [1] * 2000, "stop": ["a"] * 1001}),
        (EmbeddingRequest, {"input": ["a"] * 1001}),
    ],
)
def test_body_with_too_many_values_is_refused_before_it_is_decoded(
    struct: Any, fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(decode, "_decoded", lambda struct, body: decoded.append(len(body)))
    with pytest.raises(InvalidRequestError, match=r"more than 1000 values \(--max-body-values\)") as raised:
        decode_request(struct, json.dumps(fields).encode(), MOST)
    assert raised.value.code == "too_many_values"
    assert not decoded


@pytest.mark.parametrize(
    ("struct", "fields"),
    [
        (ChatRequest, {"messages": HI * 300}),
        (ChatRequest, {"messages": [{"role": "user", "content": "[{,:" * 9999}]}),
        (CompletionRequest, {"prompt": [1] * 100_000, "stop": ["a"] * 9}),
        (CompletionRequest, {"prompt": [[1] * 2000] * 100}),
        (EmbeddingRequest, {"input": [1] * 3000}),
    ],
)
def test_long_texts_and_lists_of_token_ids_are_not_too_many_values(struct: Any, fields: Any) -> None:
    body = json.dumps(fields).encode()
    assert decode_request(struct, body, MOST) == decode_request(struct, body)
