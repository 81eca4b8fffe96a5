"""Streamed text equals the decoded text for any chunks, tokens and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tokenizer.detokenizer import Delta, IncrementalDetokenizer, TextOffsets
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"
KINDS = {name: load_tokenizer(FIXTURES / name) for name in ("byte_level", "sentencepiece")}
BYTE_LEVEL = KINDS["byte_level"]
SENTENCEPIECE = KINDS["sentencepiece"]

kinds = st.sampled_from(sorted(KINDS)).map(KINDS.__getitem__)
# Mostly the first ids: control tokens, single bytes and half characters.
token_ids = st.lists(
    st.one_of(st.integers(0, 383), st.sampled_from([0, 1, 2, 3 + 0xE2, 3 + 0x82, 3 + 0xAC])), max_size=24
)
texts = st.text(alphabet="abé€😀 \n", max_size=30)


def chunks(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """`ids` cut into pieces of these sizes (repeated), some of them empty."""
    pieces = []
    start = 0
    while start < len(ids):
        for size in [*sizes, 1]:
            pieces.append(ids[start : start + size])
            start += size
    return pieces


def stream(detokenizer: IncrementalDetokenizer, pieces: Sequence[Sequence[int]]) -> list[Delta]:
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


def joined(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def cut_at_first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The specification: read character by character; the first stop string to be complete, in list order."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(kinds, token_ids, st.lists(st.integers(0, 4), max_size=5), st.booleans())
def test_deltas_join_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    deltas = stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), chunks(ids, sizes))
    assert joined(deltas) == tokenizer.decode(ids, skip)
    assert sum(delta.num_tokens for delta in deltas) == len(ids)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(kinds, token_ids, token_ids, st.booleans())
def test_generated_text_continues_the_prompt(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool
) -> None:
    state = tokenizer.text_state(skip_special_tokens=skip)
    for token_id in prompt:
        state.push(token_id)
    expected = "".join(map(state.push, ids)) + state.flush()
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    assert joined(stream(detokenizer, [ids])) == expected


@settings(max_examples=400, deadline=None)
@given(
    kinds,
    texts,
    st.lists(st.text(alphabet="abé€ \n", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), max_size=5),
    st.booleans(),
)
def test_stop_strings_cut_as_the_specification_says(
    tokenizer: Tokenizer, text: str, stops: list[str], sizes: list[int], include_stop: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected, expected_stop = cut_at_first_stop(tokenizer.decode(ids), stops)
    if include_stop and expected_stop is not None:
        expected += expected_stop
    one_shot = IncrementalDetokenizer(tokenizer, (), stops, include_stop=include_stop)
    streamed = IncrementalDetokenizer(tokenizer, (), stops, include_stop=include_stop)
    whole = stream(one_shot, [ids])
    deltas = stream(streamed, chunks(ids, sizes))
    assert joined(whole) == joined(deltas) == expected
    assert next((delta.stop for delta in deltas if delta.stop), None) == expected_stop
    assert streamed.is_stopped == (expected_stop is not None)
    assert sum(delta.num_tokens for delta in deltas) == sum(delta.num_tokens for delta in whole)


@settings(max_examples=200, deadline=None)
@given(texts, st.lists(st.text(alphabet="abé ", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), stops)
    shown = ""
    ids = BYTE_LEVEL.encode(text)
    for position, token_id in enumerate(ids, start=1):
        shown += detokenizer.push([token_id]).text
        if detokenizer.is_stopped:
            return
        state = BYTE_LEVEL.text_state(skip_special_tokens=True)
        complete = "".join(map(state.push, ids[:position]))
        held = complete[len(shown) :]
        possible = [stop[:size] for stop in stops for size in range(1, len(stop))]
        longest = max((part for part in possible if complete.endswith(part)), key=len, default="")
        assert held == longest


def test_a_character_appears_whole_with_its_last_byte() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("😀")
    assert len(ids) == 4
    assert [detokenizer.push([token_id]).text for token_id in ids] == ["", "", "", "😀"]


def test_a_truncated_character_is_flushed_as_one_replacement_character() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push(BYTE_LEVEL.encode("😀")[:3]).text == ""
    assert detokenizer.finish() == Delta("\ufffd", 0)


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    ids = BYTE_LEVEL.encode("x😀")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, ids[:3])
    assert detokenizer.push(ids[3:]).text == "😀"


def test_tokens_after_the_stop_string_are_dropped() -> None:
    ids = BYTE_LEVEL.encode("one STOP two")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), ["STOP"])
    delta = detokenizer.push(ids)
    assert (delta.text, delta.stop) == ("one ", "STOP")
    assert BYTE_LEVEL.decode(ids[: delta.num_tokens]) == "one STOP"
    assert detokenizer.push(ids) == Delta("", 0)
    assert detokenizer.finish() == Delta("", 0)


def test_of_two_matches_the_one_complete_first_wins_then_list_order() -> None:
    for stops, expected in (
        (["lo w", "el"], ("H", "el")),
        (["el", "Hel"], ("H", "el")),
        (["Hel", "el"], ("", "Hel")),
    ):
        delta = IncrementalDetokenizer(BYTE_LEVEL, (), stops).push(BYTE_LEVEL.encode("Hello world"))
        assert (delta.text, delta.stop) == expected


def test_text_held_for_a_stop_string_that_never_comes_is_shown_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), ["abcX"])
    assert detokenizer.push(BYTE_LEVEL.encode("zzabc")).text == "zz"
    assert detokenizer.finish() == Delta("abc", 0)


def test_a_stop_string_may_match_the_flushed_replacement_character() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, (), ["\ufffd"])
    detokenizer.push(BYTE_LEVEL.encode("a😀")[:2])
    assert detokenizer.finish() == Delta("", 0, "\ufffd")


def test_sentencepiece_keeps_the_space_between_prompt_and_answer() -> None:
    prompt = SENTENCEPIECE.encode("The capital")
    answer = SENTENCEPIECE.encode("of France", add_special_tokens=False)
    assert IncrementalDetokenizer(SENTENCEPIECE, prompt).push(answer).text == " of France"
    # Nothing visible before it: the encoder's own space goes.
    assert IncrementalDetokenizer(SENTENCEPIECE, [1]).push(answer).text == "of France"
    assert IncrementalDetokenizer(SENTENCEPIECE, [1], skip_special_tokens=False).push(answer).text == " of France"


def test_the_end_of_a_long_prompt_is_all_that_is_read() -> None:
    class Counted(list[int]):
        reads = 0

        def __reversed__(self):  # type: ignore[no-untyped-def]
            for index in range(len(self) - 1, -1, -1):
                Counted.reads += 1
                yield self[index]

    IncrementalDetokenizer(BYTE_LEVEL, Counted(BYTE_LEVEL.encode("a b c ") * 1000))
    assert Counted.reads <= 4


def test_logprob_tokens_carry_their_raw_bytes() -> None:
    first = BYTE_LEVEL.encode("😀")[0]
    assert (BYTE_LEVEL.token_text(first), BYTE_LEVEL.token_bytes(first)) == ("bytes:\\xf0", b"\xf0")
    assert (BYTE_LEVEL.token_text(2), BYTE_LEVEL.token_bytes(2)) == ("<|im_end|>", b"<|im_end|>")


@pytest.mark.parametrize("tokenizer", KINDS.values(), ids=KINDS)
def test_text_offsets_point_at_each_token_in_the_text(tokenizer: Tokenizer) -> None:
    text = "Hello é😀 the dog"
    ids = tokenizer.encode(text, add_special_tokens=False)
    offsets = TextOffsets(tokenizer)
    found = [*offsets.push(ids[:3]), *offsets.push(ids[3:])]
    assert found[0] == 0
    for index, offset in enumerate(found):
        whole = tokenizer.decode(ids[:index]).rstrip("\ufffd")
        assert offset == len(whole)


def test_shown_control_tokens_have_text_while_others_are_skipped() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, shown_token_ids=frozenset({2}))
    assert detokenizer.push([1, 2, *BYTE_LEVEL.encode("a"), 0]).text == "<|im_end|>a"
