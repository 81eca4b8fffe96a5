"""Incremental detokenization of generated tokens: whole characters, cut at the first stop string.

The first match is the one whose last character comes first; of two that end together, the one earlier in the list.
That depends on the text only, not on its tokens or steps.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.tokenizer.token_bytes import TokenBytes

if TYPE_CHECKING:
    from jaxserve.tokenizer.tokenizer import Tokenizer

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


@dataclass(frozen=True, slots=True)
class Delta:
    """Output of one `push` or `finish`."""

    text: str
    """Empty inside a character, and while text is held back for a possible stop string."""
    num_tokens: int
    """Tokens consumed; fewer than pushed if a stop string ended the text."""
    stop: str | None = None
    """Stop string that ended the text."""


class _StopMatcher:
    """Knuth-Morris-Pratt for one stop string: constant amortised cost per character."""

    __slots__ = ("_failure", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest prefix of `stop` that ends the text so far."""
        self._failure = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._failure[length - 1]
            length += stop[index] == stop[length]
            self._failure[index] = length

    def advance(self, character: str) -> bool:
        """Return True if this character completes the stop string; do not call it again after that."""
        matched = self.num_matched
        while matched and character != self.stop[matched]:
            matched = self._failure[matched - 1]
        matched += character == self.stop[matched]
        self.num_matched = matched
        return matched == len(self.stop)


class IncrementalDetokenizer:
    """Text of one generated sequence. Not thread-safe.

    Joined, the deltas are `tokenizer.decode` of the generated tokens as a continuation of the prompt, up
    to the first stop string. Only the longest end of the text that begins a stop string is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """shown_token_ids: control tokens that are not skipped, because a parser needs them. min_tokens: tokens at the
        start whose text is not searched for stop strings."""
        self._state = tokenizer.text_state(skip_special_tokens=skip_special_tokens, shown_token_ids=shown_token_ids)
        self._state.skip_prompt(prompt_token_ids)
        self._matchers = [_StopMatcher(text) for text in stop if text]
        self._include_stop = include_stop
        self._num_exempt = min_tokens
        self._held = ""
        self._stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        """True if a stop string ended the text: later tokens are dropped."""
        return self._stop is not None

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Return the text of new tokens. The caller leaves out tokens that must not show, such as stop ids."""
        pieces = []
        num_tokens = 0
        for token_id in token_ids:
            if self._stop is not None:
                break
            num_tokens += 1
            piece = self._state.push(token_id)
            is_exempt = self._num_exempt > 0
            self._num_exempt -= is_exempt
            if piece:
                pieces.append(self._cut(piece) if self._matchers and not is_exempt else piece)
        return Delta("".join(pieces), num_tokens, self._stop if num_tokens else None)

    def finish(self) -> Delta:
        """Return the text held back, and U+FFFD for an incomplete character."""
        if self._stop is not None:
            return Delta("", 0)
        rest = self._state.flush()
        text = self._cut(rest) if self._matchers else rest
        text += self._held
        self._held = ""
        return Delta(text, 0, self._stop)

    def _cut(self, piece: str) -> str:
        """Return the part of held text and `piece` that may be shown; set the stop string if one is complete."""
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if complete:
                self._stop = complete[0]
                self._held = ""
                return text[: end if self._include_stop else end - len(self._stop)]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class TextOffsets:
    """`text_offset` of a completion: the character at which each token begins.

    Offsets ignore text held back for a stop string. A token inside a character has the offset of the character.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
        start: int = 0,
    ) -> None:
        """shown_token_ids: as for IncrementalDetokenizer. start: characters before the first token."""
        self._state = tokenizer.text_state(skip_special_tokens=skip_special_tokens, shown_token_ids=shown_token_ids)
        self._state.skip_prompt(prompt_token_ids)
        self._offset = start

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._state.push(token_id))
        return offsets

    def ends_at(self, offset: int) -> bool:
        """Return True if the text so far ends at `offset`, and not inside a character."""
        return self._offset == offset and not self._state.is_inside_character
