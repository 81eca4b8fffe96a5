"""Control tokens of a vocabulary, found in texts and broken in two."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

_PART_CHARS: Final = 64 << 10
"""Characters that one search looks at. A search holds the interpreter's lock: 15 ns for each character of `<|<|<|`."""
_PIECES_AT_ONCE: Final = 8192
"""Pieces of a text that are joined at once."""


class ControlTokens:
    """Control tokens of a vocabulary (special added tokens, such as `<|im_end|>`) and their texts."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        """texts: by token id."""
        self._texts = dict(texts)
        self._ids = {text: token_id for token_id, text in texts.items()}
        self.ids = frozenset(texts)
        # A control token of one character cannot be broken in two.
        breakable = sorted((text for text in texts.values() if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, breakable))) if breakable else None
        self._most_chars = len(breakable[0]) if breakable else 0

    def in_texts(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of control tokens whose text occurs in any of `texts`."""
        return frozenset(token_id for token_id, token in self._texts.items() if any(token in text for text in texts))

    def include(self, texts: Iterable[str]) -> bool:
        """Return True if every one of `texts` is a control token."""
        return self._ids.keys() >= set(texts)

    def split(self, text: str) -> tuple[str | int, ...]:
        """Return the text with the ids of its control tokens in their places."""
        parts: list[str | int] = []
        end = 0
        for match in self._matches(text):
            parts += [text[end : match.start()], self._ids[match[0]]]
            end = match.end()
        return tuple(part for part in (*parts, text[end:]) if part != "")

    def broken(self, value: Any, mark: str) -> Any:
        """Return JSON data with `mark` after the first character of every control token in its strings."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._broken_text(value, mark)
        if isinstance(value, Mapping):
            return {self.broken(key, mark): self.broken(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item, mark) for item in value]
        return value

    def _broken_text(self, text: str, mark: str) -> str:
        """Return the text with `mark` in every control token, also in those that overlap others."""
        broken = self._broken_once(text, mark)
        while broken is not text:
            text, broken = broken, self._broken_once(broken, mark)
        return text

    def _broken_once(self, text: str, mark: str) -> str:
        joined: list[str] = []
        pieces: list[str] = []
        end = 0
        for match in self._matches(text):
            pieces += (text[end : match.start() + 1], mark)
            end = match.start() + 1
            if len(pieces) >= _PIECES_AT_ONCE:
                joined.append("".join(pieces))
                pieces.clear()
        return "".join((*joined, *pieces, text[end:])) if end else text

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the control tokens of a text, from left to right, as `finditer` does. No search is longer than a part."""
        start = 0
        while self._pattern is not None and start < len(text):
            end = start + _PART_CHARS
            match = self._pattern.search(text, start, end + self._most_chars - 1)
            if match is None or match.start() >= end:  # the next part sees all of what begins after this one
                start = end
            else:
                yield match
                start = match.end()
