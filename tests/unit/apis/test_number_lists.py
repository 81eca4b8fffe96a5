"""Long lists of token ids are decoded and checked in parts, with the outcome of the whole."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.apis.openai.completions_schema import CompletionRequest
from jaxserve.apis.openai.embeddings import EmbeddingRequest
from jaxserve.apis.openai.tokenize import DetokenizeRequest
from jaxserve.apis.schema import decode, large_bodies
from jaxserve.apis.schema.decode import decode_request
from jaxserve.apis.schema.large_bodies import decode_numbers
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend import tokenization as module
from jaxserve.frontend.tokenization import tokenization

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
LISTS = st.lists(NUMBERS) | st.lists(st.lists(NUMBERS)) | st.lists(NUMBERS | st.lists(NUMBERS | st.lists(NUMBERS)))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_BYTES_ON_LOOP", 0)
    monkeypatch.setattr(large_bodies, "PART_BYTES", 7)
    monkeypatch.setattr(decode, "_LARGE_BYTES", 16)


@given(LISTS, st.sampled_from([(",", ":"), (" , ", ": ")]))
def test_parts_are_the_whole_or_nothing(value: list[Any], separators: tuple[str, str]) -> None:
    raw = json.dumps(value, separators=separators).encode()
    whole = msgspec.json.decode(raw)
    is_flat = all(not isinstance(inner, list) for item in value if isinstance(item, list) for inner in item)
    found = decode_numbers(raw)
    assert found == whole if is_flat else found in (None, whole)
    has_integers_only = all(type(item) is int for item in whole)
    assert decode_numbers(raw, integers=True) == (whole if has_integers_only else None)


@pytest.mark.parametrize(
    "raw", [b'["1"]', b"[true]", b"12", b"{}", b'"[1]"', b"[1,]", b"[,1]", b"[1 2]", b"[1][2]", b""]
)
def test_anything_else_is_left_to_the_decoder(raw: bytes) -> None:
    assert decode_numbers(raw) is None


@given(st.lists(st.integers(0, 9**9), max_size=40) | st.lists(st.lists(st.integers(0, 9**9)), max_size=9))
def test_a_body_in_parts_equals_the_body_at_once(value: list[Any]) -> None:
    for struct, name in ((CompletionRequest, "prompt"), (EmbeddingRequest, "input"), (DetokenizeRequest, "tokens")):
        body = json.dumps({"model": "m", name: value, "unknown": 1}).encode()
        try:
            whole = msgspec.json.decode(body, type=struct)
        except msgspec.ValidationError as error:
            with pytest.raises(InvalidRequestError, match=str(error)[:20]):
                decode_request(struct, body)
        else:
            assert decode_request(struct, body) == (whole, ["unknown"])


def test_no_part_is_larger_than_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Decoder:
        def decode(self, data: bytes) -> Any:
            sizes.append(len(data))
            return msgspec.json.decode(data)

    monkeypatch.setattr(decode, "MAX_BYTES_ON_LOOP", 0)
    monkeypatch.setattr(large_bodies, "PART_BYTES", 1000)
    monkeypatch.setattr(large_bodies, "_LIST", Decoder())
    assert decode_numbers(str([12345] * 5000).encode()) == [12345] * 5000
    assert len(sizes) >= 34 and max(sizes) <= 1000 + len("12345, []")


async def test_many_ids_are_checked_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    check = module.check_token_ids

    def watch(name: str, ids: list[Any], vocab_size: int) -> None:
        seen.append((len(ids), threading.current_thread() is threading.main_thread()))
        check(name, ids, vocab_size)

    monkeypatch.setattr(module, "check_token_ids", watch)
    with tokenization() as tokens:
        await tokens.check_token_ids("prompt", [[1] * 10], 400)
        await tokens.check_token_ids("prompt", [[1] * 20_000, [2]], 400)
        with pytest.raises(InvalidRequestError, match="token id 400 is outside the vocabulary"):
            await tokens.check_token_ids("prompt", [[1] * 9000 + [400]], 400)
    assert seen == [(10, True), (8192, False), (8192, False), (3616, False), (1, False), (8192, False), (809, False)]
