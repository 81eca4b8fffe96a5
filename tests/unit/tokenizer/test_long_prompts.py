"""Long prompts are searched, encoded and listed in parts, so that an event loop beside their thread goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tokenizer import control_tokens, tokenizer
from jaxserve.tokenizer.control_tokens import ControlTokens
from jaxserve.tokenizer.tokenizer import Tokenizer, TooManyTokensError, load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"
CONTROL = {1: "<|a|>", 2: "<|a", 3: "|><", 4: "<|a|><|a|>"}
TEXTS = st.lists(st.sampled_from([*CONTROL.values(), "<", "|", "a", ">", "xy"]), max_size=30).map("".join)


class Encoding:
    """An encoding that notes whether its ids are listed."""

    def __init__(self, backend: Backend, encoding: Any) -> None:
        self._backend = backend
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self._encoding)

    @property
    def ids(self) -> list[int]:
        self._backend.num_listed += len(self)
        return list(self._encoding.ids)


class Backend:
    """The library's tokenizer, and what it is asked for."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.batches: list[Sequence[str]] = []
        self.num_listed = 0

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> list[Encoding]:
        self.batches.append(texts)
        return [
            Encoding(self, one) for one in self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        ]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return load_tokenizer(FIXTURES / "byte_level")


@pytest.fixture
def backend(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Backend:
    watched = Backend(byte_level._backend)
    monkeypatch.setattr(byte_level, "_backend", watched)
    return watched


@given(TEXTS, st.integers(1, 9), st.integers(1, 3))
def test_control_tokens_are_found_in_parts_as_in_the_whole(text: str, part_chars: int, num_pieces: int) -> None:
    tokens = ControlTokens(CONTROL)
    whole = tokens.split(text), tokens.broken(text, "#")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_tokens, "_PART_CHARS", part_chars)
        patch.setattr(control_tokens, "_PIECES_AT_ONCE", num_pieces)
        assert (tokens.split(text), tokens.broken(text, "#")) == whole
    assert tokens.split(whole[1]) == ((whole[1],) if text else ())


def test_no_search_is_longer_than_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Pattern:
        def search(self, text: str, start: int, end: int) -> None:
            lengths.append(min(end, len(text)) - start)

    tokens = ControlTokens(CONTROL)
    monkeypatch.setattr(tokens, "_pattern", Pattern())
    text = "<|" * 100_000
    assert tokens.broken(text, "#") == text
    assert max(lengths) <= (64 << 10) + max(map(len, CONTROL.values()))


def test_a_text_full_of_control_tokens_is_encoded_a_few_pieces_at_a_time(
    byte_level: Tokenizer, backend: Backend
) -> None:
    [control] = [text for text in ("<|im_end|>",) if byte_level.control_tokens.include([text])]
    ids = byte_level.encode_chat([{"role": "user", "content": control * 1000}])
    assert sum(map(len, backend.batches)) > 1000
    assert max(map(len, backend.batches)) <= 256
    assert len(ids) == backend.num_listed > 1000
    with pytest.raises(TooManyTokensError) as raised:
        byte_level.encode_chat([{"role": "user", "content": control * 1000}], max_tokens=100)
    assert (raised.value.num_tokens, raised.value.is_exact) == (len(ids), True)


def test_ids_of_a_text_that_is_too_long_are_not_listed(byte_level: Tokenizer, backend: Backend) -> None:
    ids = byte_level.encode("x y " * 50)
    assert backend.num_listed == len(ids)
    assert byte_level.encode("x y " * 50, max_tokens=len(ids)) == ids
    backend.num_listed = 0
    with pytest.raises(TooManyTokensError) as raised:
        byte_level.encode("x y " * 50, max_tokens=len(ids) - 1)
    assert (raised.value.num_tokens, raised.value.is_exact) == (len(ids), True)
    assert backend.num_listed == 0


def test_a_text_of_far_too_many_tokens_is_refused_by_its_first_windows(
    byte_level: Tokenizer, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_LARGE_BYTES", 100)
    monkeypatch.setattr(tokenizer, "_WINDOW_CHARS", 10)
    with pytest.raises(TooManyTokensError) as raised:
        byte_level.encode("é" * 1000, max_tokens=15)
    assert (raised.value.num_tokens, raised.value.is_exact) == (15, False)
    assert 0 < sum(len(text) for batch in backend.batches for text in batch) <= 40
    assert backend.num_listed == 0
    text = "x y " * 40
    ids = byte_level.encode(text)
    assert byte_level.encode(text, max_tokens=len(ids)) == ids


@pytest.mark.parametrize("folder", ["byte_level", "sentencepiece"])
def test_the_beginning_of_a_text_has_the_tokens_of_the_whole(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tokenizer(FIXTURES / folder)
    texts = ["Hello world " * 3000, " " * 9000 + "é😀" * 3000, "a" * 9000 + "\n\n b" * 3000, "x"]
    ids = [loaded.encode(text, add_special_tokens=False) for text in texts]
    special = [loaded.encode_cut(text, 300, add_special_tokens=True) for text in texts]
    pairs = list(loaded.encode_pairs([(texts[0], text) for text in texts], 300))
    monkeypatch.setattr(tokenizer, "_MARGIN_CHARS", 16)
    monkeypatch.setattr(tokenizer, "_MARGIN_TOKENS", 64)
    for text, whole, with_special, pair in zip(texts, ids, special, pairs, strict=True):
        for num_tokens in (1, 10, 300, 20_000):
            assert loaded.encode_cut(text, num_tokens, add_special_tokens=False) == whole[:num_tokens]
        assert loaded.encode_cut(text, 300, add_special_tokens=True) == with_special
        assert list(loaded.encode_pairs([(texts[0], text)], 300)) == [pair]


def test_of_a_text_that_is_cut_only_the_beginning_is_encoded(byte_level: Tokenizer, backend: Backend) -> None:
    assert len(byte_level.encode_cut("x y " * 1_000_000, 100, add_special_tokens=False)) == 100
    assert sum(len(text) for batch in backend.batches for text in batch) < 100_000
    assert backend.num_listed < 100_000
