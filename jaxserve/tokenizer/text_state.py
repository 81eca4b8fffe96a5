"""Tokens to text, one token at a time, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.tokenizer.token_bytes import TokenBytes

_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_CHARACTER_BYTES = 4


@dataclass(slots=True)
class TextState:
    """Decoder state of a text that grows token by token. Constant cost per byte; nothing is decoded twice.

    The outputs of `push` and `flush` join to the text of all tokens.
    """

    token_bytes: TokenBytes
    skipped_ids: frozenset[int]
    """Tokens without text: the control tokens, or none."""
    _num_spaces_to_strip: int = field(init=False)
    _decoder: codecs.IncrementalDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._num_spaces_to_strip = self.token_bytes.num_stripped_spaces
        self._decoder = _UTF8("replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty inside a character."""
        data = self._bytes(token_id)
        if data and self._num_spaces_to_strip:
            data = self._strip(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return U+FFFD if the text ends inside a character, else an empty text."""
        return self._decoder.decode(b"", final=True)

    @property
    def is_inside_character(self) -> bool:
        """True if the tokens so far end inside a character, whose text comes with a later one."""
        return bool(self._decoder.getstate()[0])

    def skip_prompt(self, token_ids: Sequence[int]) -> None:
        """Continue after these tokens without returning their text; only their end is read.

        A character begun by the prompt is returned whole once later tokens complete it.
        """
        tail = b""
        for token_id in reversed(token_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        if tail:
            self._num_spaces_to_strip = 0
        self._decoder.decode(tail)

    def _bytes(self, token_id: int) -> bytes:
        table = self.token_bytes.table
        if token_id in self.skipped_ids or not 0 <= token_id < len(table):
            return b""
        return table[token_id]

    def _strip(self, data: bytes) -> bytes:
        while self._num_spaces_to_strip and data.startswith(b" "):
            data = data[1:]
            self._num_spaces_to_strip -= 1
        if data:
            self._num_spaces_to_strip = 0
        return data
