"""BERT's tokenizer from a vocab.txt."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.models.goldens import DATA

BERT = DATA / "encoders" / "bert_tiny"
TEXTS = ["The quick brown fox.", "FOXES jump, dogs don't!", "naïve 你 fox", "", "zebra " + "x" * 200]


def theirs_of_bert() -> Any:
    from transformers import BertTokenizer  # here, since other workers need not import it

    return BertTokenizer.from_pretrained(BERT)


@pytest.mark.slow
def test_ids_are_those_of_transformers() -> None:
    theirs, ours = theirs_of_bert(), load_tokenizer(BERT)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"], text


def test_words_are_joined_from_their_pieces() -> None:
    tokenizer = load_tokenizer(BERT)
    assert tokenizer.decode(tokenizer.encode("Foxes jump over dogs")) == "foxes jump over dogs"


def test_word_piece_tokens_do_not_bound_the_text() -> None:
    tokenizer = load_tokenizer(BERT)
    assert len(tokenizer.encode("y" * 5000)) == 3
    assert tokenizer.longest_token_chars == sys.maxsize


def test_a_vocabulary_without_control_tokens_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nfox\n")
    with pytest.raises(
        CheckpointError, match=r"vocab.txt: expected the tokens .*, found no \[CLS\], \[SEP\], \[MASK\]"
    ):
        load_tokenizer(tmp_path)


def test_a_setting_of_the_wrong_type_is_rejected(tmp_path: Path) -> None:
    shutil.copytree(BERT, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": "yes"}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: do_lower_case: expected true or false"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("most", [None, 40, 12, 5])
@pytest.mark.parametrize(
    ("one", "other"), [("the fox", "lazy dogs jump over many"), ("a b c d e f g h", "fox"), ("a b c d", "e f g h")]
)
def test_pairs_are_those_of_transformers_cut_from_the_longer_text(one: str, other: str, most: int | None) -> None:
    theirs = theirs_of_bert()
    expected = theirs(one, other, truncation="longest_first" if most else False, max_length=most)
    ids, start = load_tokenizer(BERT).encode_pair(one, other, most)
    assert len(ids) == len(expected["input_ids"])
    assert start == expected["token_type_ids"].index(1)
    assert ids == expected["input_ids"]


def test_special_tokens_that_leave_no_space_are_an_error() -> None:
    tokenizer = load_tokenizer(BERT)
    assert len(tokenizer.encode_cut("the quick brown fox", 3, add_special_tokens=True)) == 3
    assert (
        tokenizer.encode_cut("the quick brown fox", 2, add_special_tokens=False) == tokenizer.encode("the quick")[1:-1]
    )
    with pytest.raises(InvalidRequestError, match="2 leaves no room beside the special tokens"):
        tokenizer.encode_cut("fox", 2, add_special_tokens=True)
    with pytest.raises(InvalidRequestError, match="4 leaves no room"):
        tokenizer.encode_pair("fox", "dog", 4)
