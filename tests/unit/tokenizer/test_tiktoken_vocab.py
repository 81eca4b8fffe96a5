"""Tokenizers of Kimi from `tiktoken.model`, against the rule of tiktoken: of all neighbours, those that make the token of the lowest rank join."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers

from jaxserve.checkpoint.files import expect_tokenizer_files
from jaxserve.errors import CheckpointError
from jaxserve.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from jaxserve.tokenizer.tiktoken_vocab import NUM_CONTROL_TOKENS
from jaxserve.tokenizer.tokenizer import Tokenizer, load_eos_token_ids, load_tokenizer

(PATTERN,) = PRE_TOKENIZERS["kimi-k2"].steps
TEXTS = (
    "Hello there, it's 12345 o'clock; we'LL  see\n\n  the\tJSONParser of HTMLs.\r\n",
    "中文字符和English混排，数字１２３४५；한국어 テキスト ひらがな",
    "Straße İstanbul ǅungla naïve\u0301 नमस्ते ไทย \U0001f469\u200d\U0001f680\u00a0\u3000 end   ",
    " aaaaaaaaaaa ababababab \u2028 \x00\x7f",
)
CODE = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


def trained_ranks() -> list[bytes]:
    """Return tokens by rank: the bytes, then what a trainer joins in texts."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        min_frequency=1,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator([" ".join(TEXTS) * 2], trainer)
    by_id = sorted(model.get_vocab().items(), key=lambda item: item[1])
    decoder = {character: byte for byte, character in _characters().items()}
    return [bytes(decoder[each] for each in token) for token, _ in by_id]


def _characters() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


RANKS = trained_ranks()


def write_model(folder: Path, lines: list[str] | None = None, **config: Any) -> Path:
    """Write a folder as published: ranks, and a config with code and control tokens."""
    stored = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(RANKS)]
    (folder / "tiktoken.model").write_text("\n".join(stored if lines is None else lines) + "\n")
    first = len(RANKS)
    added = {
        first: {"content": "[BOS]", "special": True},
        first + 1: {"content": "[EOS]", "special": True},
        first + 2: {"content": "<|im_end|>", "special": True},
        first + 9: {"content": "<think>", "special": False},
    }
    whole = {"auto_map": CODE, "bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": added, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))
    return folder


def joined(word: bytes) -> list[int]:
    """Return the tokens of a word by tiktoken's rule."""
    ranks = {token: rank for rank, token in enumerate(RANKS)}
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        found = [(ranks[a + b], index) for index, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, index = min(found)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_model(tmp_path_factory.mktemp("kimi")))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_tiktoken(tokenizer: Tokenizer, text: str) -> None:
    words = regex.findall(PATTERN, text, flags=regex.V1)
    assert "".join(words) == text
    ids = [token_id for word in words for token_id in joined(word.encode())]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_chinese_characters_are_words_of_their_own() -> None:
    assert regex.findall(PATTERN, "中文abc中文1234 it's", flags=regex.V1) == [
        "中文",
        "abc",
        "中文",
        "123",
        "4",
        " it's",
    ]


def test_control_tokens_follow_and_the_others_are_reserved(tokenizer: Tokenizer) -> None:
    first = len(RANKS)
    assert tokenizer.encode("<|im_end|>a<think>") == [first + 2, *joined(b"a"), first + 9]
    assert tokenizer.encode(f"<|reserved_token_{first + 3}|>") == [first + 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (first, (first + 1,))
    assert tokenizer.vocab_size == first + NUM_CONTROL_TOKENS
    assert tokenizer.decode([first + 9, first + 2, first + 3]) == "<think>", "it is no control token"


def test_control_tokens_without_an_embedding_are_text(tmp_path: Path) -> None:
    """The placeholder of videos of Kimi K2.5 has the first id that no published model has a row of."""
    last = len(RANKS) + NUM_CONTROL_TOKENS
    write_model(tmp_path, added_tokens_decoder={last: {"content": "<|video|>", "special": True}})
    found = load_tokenizer(tmp_path)
    assert found.vocab_size == last
    assert len(found.encode("<|video|>")) > 1


def test_the_end_is_known_without_the_vocabulary(tmp_path: Path) -> None:
    assert load_eos_token_ids(write_model(tmp_path)) == (len(RANKS) + 1,)


@pytest.mark.parametrize(
    "name", ["tokenization_moonshot.TikTokenTokenizer", "owner/name--tokenization_kimi.TikTokenTokenizer"]
)
def test_the_same_code_may_have_other_names(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, auto_map={"AutoTokenizer": [name, None]})
    assert load_tokenizer(tmp_path).vocab_size == len(RANKS) + NUM_CONTROL_TOKENS
    expect_tokenizer_files(tmp_path, "model")


def test_other_code_may_divide_texts_differently(tmp_path: Path) -> None:
    write_model(tmp_path, auto_map={"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]})
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and its tokenizer is code"):
        load_tokenizer(tmp_path)


GOOD = [f"{base64.b64encode(bytes([each])).decode()} {each}" for each in range(256)]


@pytest.mark.parametrize(
    ("lines", "config", "message"),
    [
        ([*GOOD, "!!! 256"], {}, r"tiktoken\.model: line 257: expected a token in base64 and its rank, found"),
        ([*GOOD, "YWI="], {}, "line 257: expected a token"),
        ([*GOOD, "YWI= x"], {}, "line 257: expected a token"),
        ([*GOOD, "YWI= 257"], {}, "each rank from 0 on once"),
        ([*GOOD[1:], "YWI= 0"], {}, "expected every byte as a token"),
        ([], {}, "expected every byte"),
        (GOOD, {"added_tokens_decoder": {"5": {"content": "x"}}}, "expected different tokens from id 256 on"),
        (GOOD, {"added_tokens_decoder": {"256": {"content": "x"}, "257": {"content": "x"}}}, "expected different tokens"),
        (GOOD, {"added_tokens_decoder": {"256": 3}}, "added_tokens_decoder: expected tokens by their ids"),
    ],
)  # fmt: skip
def test_other_files_are_rejected_in_one_line(tmp_path: Path, lines: list[str], config: Any, message: str) -> None:
    write_model(tmp_path, lines, **config)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
