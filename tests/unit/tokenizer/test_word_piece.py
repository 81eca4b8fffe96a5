"""BERT's tokenizer from a vocab.txt."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers.models import WordPiece

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


def test_a_token_may_be_a_line_separator(tmp_path: Path) -> None:
    """Only line feeds end the lines of the file. Chinese vocabularies have U+2028."""
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n\u2028\n\x85x\n我\n你\n", encoding="utf-8")
    expected = WordPiece.read_file(str(path))
    assert load_tokenizer(tmp_path).encode("我你") == [2, expected["我"], expected["你"], 3] == [2, 7, 8, 3]


def test_a_vocabulary_without_control_tokens_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nfox\n")
    with pytest.raises(
        CheckpointError, match=r"vocab.txt: expected the tokens .*, found no \[CLS\], \[SEP\], \[MASK\]"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "settings", "reason"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}, "BertJapaneseTokenizer"),
        ("config.json", {"tokenizer_class": "RoFormerTokenizerFast"}, "RoFormerTokenizerFast"),
        ("tokenizer_config.json", {"word_tokenizer_type": "mecab"}, 'word_tokenizer_type: expected "basic"'),
        ("tokenizer_config.json", {"subword_tokenizer_type": "character"}, 'subword_tokenizer_type: expected "wordpiece"'),
        ("tokenizer_config.json", {"do_basic_tokenize": False}, "do_basic_tokenize: expected true"),
    ],
)  # fmt: skip
def test_a_vocabulary_of_another_tokenizer_is_rejected(
    file: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nfox\n")
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=reason):
        load_tokenizer(tmp_path)


def test_a_vocabulary_of_berts_tokenizer_may_name_it(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nfox\n")
    settings = {"tokenizer_class": "DistilBertTokenizerFast", "do_basic_tokenize": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path).encode("fox") == [2, 5, 3]


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
    [(ids, start)] = load_tokenizer(BERT).encode_pairs([(one, other)], most)
    assert len(ids) == len(expected["input_ids"])
    assert start == expected["token_type_ids"].index(1)
    assert ids == expected["input_ids"]


class Backend:
    """The library's tokenizer, and the texts that it has encoded."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> Any:
        self.texts += texts
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("most", [None, 12, 6])
def test_the_first_text_of_many_pairs_is_encoded_once(most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long query of white space has no tokens, so that no check of a length ends the work."""
    loaded = load_tokenizer(BERT)
    pairs = [(one, other) for one in (" " * 40, "a b c d e f g h") for other in ("fox", "the lazy dogs jump over many")]
    expected = [each for pair in pairs for each in loaded.encode_pairs([pair], most)]
    monkeypatch.setattr(loaded, "_backend", backend := Backend(loaded._backend))
    assert list(loaded.encode_pairs(pairs, most)) == expected
    assert [backend.texts.count(pairs[place][0]) for place in (0, 2)] == [1, 1]


def test_special_tokens_that_leave_no_space_are_an_error() -> None:
    tokenizer = load_tokenizer(BERT)
    assert len(tokenizer.encode_cut("the quick brown fox", 3, add_special_tokens=True)) == 3
    assert (
        tokenizer.encode_cut("the quick brown fox", 2, add_special_tokens=False) == tokenizer.encode("the quick")[1:-1]
    )
    with pytest.raises(InvalidRequestError, match="2 leaves no room beside the special tokens"):
        tokenizer.encode_cut("fox", 2, add_special_tokens=True)
    with pytest.raises(InvalidRequestError, match="4 leaves no room"):
        next(tokenizer.encode_pairs([("fox", "dog")], 4))
