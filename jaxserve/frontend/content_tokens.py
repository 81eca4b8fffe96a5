"""Which tokens stand behind the content of a reply that also has reasoning and calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxserve.apis.openai.logprobs import ScoredToken
from jaxserve.frontend.parsers.events import Event


@dataclass(frozen=True, slots=True)
class ContentToken:
    """A token of which some character is content."""

    token: ScoredToken
    end: int
    """Characters of content up to its last one."""


@dataclass(slots=True)
class _Stretch:
    """Text that came at once, and the tokens whose text it completed."""

    end: int
    tokens: list[ScoredToken] = field(default_factory=list)
    is_content: bool = False


class ContentTokens:
    """Follows a parser: takes tokens with the text that they released, and what the parser says of that text."""

    def __init__(self) -> None:
        self._unread: deque[_Stretch] = deque()
        self._textless: list[ScoredToken] = []
        """Tokens whose text comes with a later one's: parts of a character, or of what may be a stop string."""
        self._num_chars = 0
        self._num_read = 0
        self._num_content = 0
        self._told: list[ContentToken] = []

    def push(self, tokens: Iterable[ScoredToken], num_chars: int) -> None:
        """The next tokens, and how many characters of text they released."""
        self._textless += tokens
        if num_chars:
            self._num_chars += num_chars
            self._unread.append(_Stretch(self._num_chars, self._textless))
            self._textless = []

    def add(self, tokens: Iterable[ScoredToken]) -> None:
        """The next tokens of a reply that is content altogether."""
        self._told += [ContentToken(token, 0) for token in tokens]

    def read(self, event: Event) -> None:
        """What the parser says of the next stretch of the text."""
        is_content = event.kind == "content"
        place, end = self._num_read, self._num_read + len(event.source)
        while self._unread and place < end:
            stretch = self._unread[0]
            stretch.is_content |= is_content
            if stretch.end > end:
                break
            self._unread.popleft()
            place = stretch.end
            if stretch.is_content:
                end_of_content = self._num_content + (place - self._num_read if is_content else 0)
                self._told += [ContentToken(token, end_of_content) for token in stretch.tokens]
        self._num_read = end
        self._num_content += len(event.text) if is_content else 0

    def take(self) -> list[ContentToken]:
        """The tokens of content that are certain since the last call."""
        told, self._told = self._told, []
        return told
