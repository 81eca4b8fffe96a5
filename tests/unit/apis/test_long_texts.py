"""Long texts of a body are decoded in parts, with the outcome of the whole."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxserve.apis.openai.chat_schema import ChatRequest
from jaxserve.apis.openai.completions_schema import CompletionRequest
from jaxserve.apis.schema import decode, large_bodies
from jaxserve.apis.schema.decode import decode_request
from jaxserve.apis.schema.large_bodies import check_utf8, shorten_texts
from jaxserve.errors import InvalidRequestError

PART_BYTES = 16
TEXTS = st.text(alphabet='a",:[]{}\\tfn\né€😀\ud7ff', max_size=60)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
AT_ANY_SPEED = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_BYTES_ON_LOOP", 0)
    monkeypatch.setattr(large_bodies, "PART_BYTES", PART_BYTES)


@AT_ANY_SPEED
@given(VALUES, st.booleans())
@example({"a" * 50: ["😀" * 20, "\\" * 50, '"' * 50, "\n" * 50]}, True)
@example({"a" * 50: ["😀" * 20, "\\" * 50, '"' * 50, "é" * 50]}, False)
def test_parts_give_the_same_value(value: Any, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    check_utf8(body)
    short = shorten_texts(body)
    assert short.restored(msgspec.json.decode(short.body)) == value


@pytest.mark.parametrize("before", range(0, 2 * PART_BYTES, 3))
def test_a_text_of_more_than_two_parts_is_long_wherever_it_begins(before: int) -> None:
    body = b'[%b"%b"]' % (b" " * before, b"a" * (2 * PART_BYTES + 1))
    assert [*shorten_texts(body).texts.values()] == ["a" * (2 * PART_BYTES + 1)]


def outcome(body: bytes) -> tuple[Any, str | None]:
    """Return the request in a body, or the error's text and field."""
    try:
        return decode_request(CompletionRequest, body)
    except InvalidRequestError as error:
        return str(error), error.param


BODIES = [
    b'{"prompt": "%b"' % (b"a" * 50),
    b'{"prompt": "%b' % (b"a" * 50),
    b'{"prompt": "%b", x}' % (b"\\n" * 50),
    b'{"prompt": "%b" "b"}' % ("é".encode() * 50),
    b'{"prompt": "%b", "echo": 3}' % ("é".encode() * 50),
    b'{"prompt": "a", "n": "%b"}' % (b"1" * 50),
    b'{"prompt": "a", "logprobs_mode": "%b"}' % (b"b" * 300),
    b'{"prompt": "a", "%b": 1}' % (b"c" * 50),
    b'{"prompt": ["%b", "d", "%b"], "stop": "%b"}' % (b"e" * 50, b"\\\\" * 50, b'\\"' * 17),
    b'{"prompt": "\x80"}',
    b'{"prompt": "%b\xf0\x9f\x98"}' % ("€".encode() * 20),
    b'{"prompt": "%b\xf0\x9f\x98(%b"}' % ("€".encode() * 20, b"x" * 50),
    b"\x80" * 50,
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_body_in_parts_has_the_outcome_of_the_whole(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts = outcome(body)
    monkeypatch.setattr(decode, "MAX_BYTES_ON_LOOP", 1 << 20)
    assert in_parts == outcome(body)


@pytest.mark.parametrize("escape", [b"\\x", b"\\ud83d\\u00e9", b"\\u12"])
@pytest.mark.parametrize("before", range(30, 50, 3))
def test_a_wrong_escape_is_named_with_its_place(escape: bytes, before: int) -> None:
    body = b'{"prompt": "%b%b%b"}' % (b"a" * before, escape, b"y" * 40)
    message, _ = outcome(body)
    assert message.startswith("The body is not valid JSON: JSON is malformed: ")
    [place] = re.findall(r"\(byte (\d+)\)", message)
    assert body.index(b"\\") <= int(place) <= body.index(b"\\") + 12


@pytest.mark.parametrize(
    "body", [b'{"prompt": "%b"}', b'{"prompt": "%b', b'{"stop": "\\ud83d\\ude00\\\\%b b"}', b'{"%b": 1}']
)
@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDC00", b"\\ud83d\\ud83d", b"\\ude00\\ud83d"])
def test_half_a_surrogate_pair_is_named_with_its_place(body: bytes, half: bytes) -> None:
    message, _ = outcome(body % half)
    place = (body % half).index(half)
    assert message == (
        f"The body is not valid JSON: JSON is malformed: `{half[:6].decode()}` is half of a surrogate pair (byte {place})."
    )


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_so(body: bytes) -> None:
    assert outcome(body) == ("The body is not valid JSON: it is empty.", None)


def test_texts_inside_structs_are_restored() -> None:
    parts = [{"type": "text", "text": "é" * 50}, {"type": "text", "text": "b"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"c" * 50: ["d" * 50]}}}
    body = json.dumps({"messages": [{"role": "user", "content": parts}], "tools": [tool], "x": 1}).encode()
    request, unknown = decode_request(ChatRequest, body)
    assert request == msgspec.json.decode(body, type=ChatRequest)
    assert unknown == ["x"]


def test_no_decoder_gets_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_BYTES_ON_LOOP", 0)
    monkeypatch.setattr(large_bodies, "PART_BYTES", 1000)
    sizes: list[int] = []

    class Decoder:
        def decode(self, data: bytes) -> Any:
            sizes.append(len(data))
            return msgspec.json.decode(data)

    monkeypatch.setattr(large_bodies, "_TEXT", Decoder())
    short = shorten_texts(json.dumps({"a": "\n" * 50_000}).encode())
    assert len(short.body) < 100
    assert sum(sizes) >= 100_000
    assert max(sizes) <= 1002
