"""The raw bytes of every token, and their conversion to text.

Three decoder families cover the models served here. Byte-level BPE writes each byte as one printable
character. SentencePiece writes a space as U+2581 and a byte outside the vocabulary as `<0xE9>`, and
its decoder drops the leading space that its encoder added. WordPiece, used by encoders only, marks a token
that continues a word with `##`; its decoder also removes spaces before punctuation, which we keep.

Text is the UTF-8 of the joined bytes, with U+FFFD for each malformed part. For well-formed text this
equals the decoder of the `tokenizers` package; it differs where that one is lossy: a malformed run of
byte tokens keeps its well-formed characters, and an added token is always its own literal text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from jaxserve.errors import CheckpointError

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTINUATION = "##"
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes by token id. Ids between tokens (padded vocabularies) have none."""

    table: tuple[bytes, ...]
    num_stripped_spaces: int
    """Spaces that the decoder removes from the start of a text: 0 or 1."""
    is_lossless: bool = True
    """True if a token of n characters covers n of the text. WordPiece has one token for all unknown words."""


def byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's character of each byte: Latin-1 if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def token_bytes(backend: tokenizers.Tokenizer, origin: str) -> TokenBytes:
    """Return the bytes of each token of `backend`; raise CheckpointError for a decoder of another family."""
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
    vocab = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    if kinds == {"ByteLevel"}:
        texts = _byte_level(vocab, added)
        num_stripped_spaces = 0
    elif kinds and kinds <= _SENTENCEPIECE_STEPS:
        texts = _sentencepiece(vocab, has_byte_tokens="ByteFallback" in kinds)
        num_stripped_spaces = max(_num_stripped_spaces(step) for step in steps)
    elif kinds == {"WordPiece"}:
        texts = {token_id: _word_piece(token) for token_id, token in vocab.items()}
        num_stripped_spaces = 1
    else:
        found = ", ".join(sorted(kinds)) or "none"
        raise CheckpointError(
            f"{origin}: tokenizer decoder: expected ByteLevel, WordPiece or a SentencePiece sequence of "
            f"{', '.join(sorted(_SENTENCEPIECE_STEPS))}, found {found}"
        )
    table = tuple(texts.get(token_id, b"") for token_id in range(max(vocab, default=-1) + 1))
    return TokenBytes(table, num_stripped_spaces, is_lossless=kinds != {"WordPiece"})


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _num_stripped_spaces(step: Mapping[str, Any]) -> int:
    if step["type"] == "Strip" and step["content"] == " ":
        return int(step["start"])
    return int(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")


def _byte_level(vocab: Mapping[int, str], added: Mapping[int, str]) -> dict[int, bytes]:
    # Latin-1 characters without a byte are mapped outside Latin-1, so that encoding them fails.
    to_latin1 = dict.fromkeys(range(0x100), 0x10000)
    to_latin1 |= {ord(char): byte for char, byte in byte_alphabet().items()}
    texts = {}
    for token_id, token in vocab.items():
        try:
            texts[token_id] = token.translate(to_latin1).encode("latin-1")
        except UnicodeEncodeError:
            texts[token_id] = token.encode()
    return texts | {token_id: content.encode() for token_id, content in added.items()}


def _sentencepiece(vocab: Mapping[int, str], *, has_byte_tokens: bool) -> dict[int, bytes]:
    texts = {}
    for token_id, token in vocab.items():
        byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        texts[token_id] = bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
    return texts


def _word_piece(token: str) -> bytes:
    return (token.removeprefix(_CONTINUATION) if token.startswith(_CONTINUATION) else f" {token}").encode()
