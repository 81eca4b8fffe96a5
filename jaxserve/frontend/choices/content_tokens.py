"""Tokens with their log-probabilities, and those of them that make the content of a reply with reasoning and calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from jaxserve.frontend.parsers.events import Event
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.tokenizer.detokenizer import TextOffsets

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with the log-probabilities that the engine reported for it."""

    token_id: int
    scores: TokenLogprobs | None
    """None for the first token of a prompt, and without requested log-probabilities."""

    @property
    def logprob(self) -> float | None:
        return None if self.scores is None else _clamp(self.scores.logprob)

    def alternatives(self, num_top: int) -> list[tuple[int, float]]:
        """Return the most likely tokens with their log-probabilities, most likely first."""
        if self.scores is None:
            return []
        pairs = zip(self.scores.top_token_ids, self.scores.top_logprobs, strict=True)
        return [(token_id, _clamp(logprob)) for token_id, logprob in pairs][:num_top]


class PromptTokens:
    """A prompt's tokens, made as they are read: a long prompt has more than an event loop should make at once."""

    def __init__(self, token_ids: Sequence[int] = (), scores: Sequence[TokenLogprobs] = ()) -> None:
        """scores: begin with the second token."""
        assert len(token_ids) == (len(scores) + 1 if token_ids else 0), "every token but the first has scores"
        self._token_ids = token_ids
        self._scores = scores

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[ScoredToken]:
        return map(ScoredToken, self._token_ids, chain([None], self._scores))


def _clamp(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class SentTokens:
    """Holds tokens back while a stop string may still cut off their text: it takes its tokens along.

    A token is released with the first character of its text; one without text, as soon as all text before it is sent.
    """

    def __init__(self, offsets: TextOffsets | None) -> None:
        """offsets: None if the request has no stop string; then no token is held back."""
        self._offsets = offsets
        self._waiting: deque[tuple[int, ScoredToken]] = deque()
        """Tokens with the number of characters that must be sent before or with them."""
        self._num_chars = 0

    def push(self, tokens: Sequence[ScoredToken], num_chars: int) -> None:
        """Add the next tokens and the number of characters that are sent from now on."""
        self._waiting.extend((self._num_chars_needed(token), token) for token in tokens)
        self._num_chars += num_chars

    def _num_chars_needed(self, token: ScoredToken) -> int:
        if self._offsets is None:
            return 0
        (offset,) = self._offsets.push([token.token_id])
        return offset if self._offsets.ends_at(offset) else offset + 1

    @property
    def has_released(self) -> bool:
        """True if `take` returns some."""
        return bool(self._waiting) and self._waiting[0][0] <= self._num_chars

    def take(self, *, is_all: bool) -> list[ScoredToken]:
        """Return the tokens released since the last call. is_all: no stop string cut the text, so all of them are."""
        taken = []
        while self.has_released or (is_all and self._waiting):
            taken.append(self._waiting.popleft()[1])
        return taken


@dataclass(frozen=True, slots=True)
class ContentToken:
    """A token with a character of content."""

    token: ScoredToken
    end: int
    """Number of characters of content up to its last one."""


@dataclass(slots=True)
class _Stretch:
    """Text that was released at once, and the tokens that it completed."""

    end: int
    tokens: list[ScoredToken] = field(default_factory=list)
    is_content: bool = False


class ContentTokens:
    """Follows a parser: takes tokens with the text that they released, and the events of that text."""

    def __init__(self) -> None:
        self._unread: deque[_Stretch] = deque()
        self._textless: list[ScoredToken] = []
        """Tokens whose text is released with a later one: parts of a character or of a possible stop string."""
        self._num_chars = 0
        self._num_read = 0
        self._num_content = 0
        self._certain: list[ContentToken] = []

    def push(self, tokens: Iterable[ScoredToken], num_chars: int) -> None:
        """Add the next tokens and the number of characters that they released."""
        self._textless += tokens
        if num_chars:
            self._num_chars += num_chars
            self._unread.append(_Stretch(self._num_chars, self._textless))
            self._textless = []

    def add(self, tokens: Iterable[ScoredToken]) -> None:
        """Add the next tokens of a reply that is only content."""
        self._certain += [ContentToken(token, 0) for token in tokens]

    def read(self, event: Event) -> None:
        """Take the parser's event for the next stretch of the text."""
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
                self._certain += [ContentToken(token, end_of_content) for token in stretch.tokens]
        self._num_read = end
        self._num_content += len(event.text) if is_content else 0

    def take(self) -> list[ContentToken]:
        """Return the tokens of content that became certain since the last call."""
        certain, self._certain = self._certain, []
        return certain
