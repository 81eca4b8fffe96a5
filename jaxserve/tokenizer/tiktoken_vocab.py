"""Kimi's tokenizer from `tiktoken.model`, a list of byte strings and ranks: K2, K2.5, K2.6 and Kimi Linear are published with it.

The expressions that divide a text are code in their repositories, which is not run: they are those of their GGUF files.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers
from tokenizers import AddedToken

from jaxserve.errors import CheckpointError, shown
from jaxserve.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from jaxserve.tokenizer.token_bytes import byte_alphabet

NUM_CONTROL_TOKENS: Final = 256
"""Tokens after those of the file, most of them reserved: published models have embeddings of these and no more."""
_MAX_TOKENS: Final = 1 << 22
_PRE_TOKENIZER: Final = replace(PRE_TOKENIZERS["kimi-k2"], ignores_merges=True)
_CHARACTERS: Final[Mapping[int, str]] = {byte: character for character, byte in byte_alphabet().items()}


class _Declared(msgspec.Struct):
    content: str
    special: bool = False


def read_tiktoken(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer of a file with lines of a token in base64 and its rank.

    config: tokenizer_config.json, which names control tokens. Raises CheckpointError naming file and line.
    """
    ranks, added = _read_ranks(path), _read_added(path.parent / "tokenizer_config.json", config)
    vocab = {_text(token): rank for token, rank in ranks.items()}
    # A word that is a token stays whole; any other word's pairs merge in the order of the ranks of what they make.
    backend = _PRE_TOKENIZER.byte_level(vocab, _merges(ranks))
    tokens = [
        AddedToken(each.content, normalized=False, special=each.special)
        for index in range(len(ranks), len(ranks) + NUM_CONTROL_TOKENS)
        for each in [added.get(index) or _Declared(f"<|reserved_token_{index}|>", special=True)]
    ]
    if min(added, default=len(ranks)) < len(ranks) or backend.add_tokens(tokens) != len(tokens):
        raise CheckpointError(
            f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder: expected different tokens from id {len(ranks)} on, "
            f"after those of {path.name}"
        )
    return backend


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks of tokens, which are their ids: each from 0 on once, and every byte among the tokens."""
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(filter(None, lines), 1):
        try:
            text, rank = line.split()
            ranks[binascii.a2b_base64(text, strict_mode=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(
                f"{path}: line {number}: expected a token in base64 and its rank, found {shown(repr(line))}"
            ) from error
    count = len(ranks)
    if (
        count > _MAX_TOKENS
        or {*ranks.values()} != {*range(count)}
        or not {bytes([each]) for each in range(256)} <= {*ranks}
    ):
        raise CheckpointError(f"{path}: expected every byte as a token, and each rank from 0 on once, found others")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, by the rank of what they make."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(ranks[left], ranks[right], left, right) for left, right in splits if left in ranks and right in ranks]
        merges += [(_text(left), _text(right)) for _, _, left, right in sorted(known)]
    return merges


def _text(token: bytes) -> str:
    return "".join(map(_CHARACTERS.__getitem__, token))


def _read_added(path: Path, config: Mapping[str, Any]) -> dict[int, _Declared]:
    """Return the control tokens that a config names, by id."""
    try:
        return msgspec.convert(config.get("added_tokens_decoder") or {}, dict[int, _Declared], strict=False)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: added_tokens_decoder: expected tokens by their ids, found {error}") from error
