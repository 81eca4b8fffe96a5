"""Prompt lookup: drafts a request's next tokens from what followed its newest tokens where they occurred before.

Source: https://github.com/apoorvumang/prompt-lookup-decoding. It needs no model. Texts repeat what they are about: code
under revision, a summary, an answer from documents; and a client may send a prediction of the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from jaxserve.types import ProgramKind

MIN_MATCH: Final = 2
"""Newest tokens that must have occurred together before, unless drafts were wrong."""
MAX_MATCH: Final = 16
"""Longest match that is looked for: a longer one makes a draft no better."""
_PROMPT_END: Final = 16
"""Tokens at the end of the prompt that a prediction continues."""


def continuation(tokens: np.ndarray, count: int, shortest: int = MIN_MATCH) -> np.ndarray:
    """Return up to `count` tokens that followed the end of `tokens` at its latest of the longest earlier matches.

    A match that reaches the end is taken to repeat; a negative number ends what can follow. Returns none if the last
    `shortest` tokens did not occur together before.
    """
    end = len(tokens) - 1
    places = np.flatnonzero(tokens[MIN_MATCH - 1 : end] == tokens[end]) + MIN_MATCH - 1
    for back in range(1, MAX_MATCH):
        agreeing = places[places >= back]
        agreeing = agreeing[tokens[agreeing - back] == tokens[end - back]]
        if not len(agreeing):
            if back < shortest:
                return tokens[:0]
            break
        places = agreeing
    if not len(places):
        return tokens[:0]
    last = int(places[-1])
    draft = tokens[last + 1 + np.arange(count) % (end - last)]
    borders = np.flatnonzero(draft < 0)
    return draft[: borders[0]] if len(borders) else draft


class DraftState:
    """One request's drafts: what they are taken from, how long the next one may be, and how good they were."""

    __slots__ = (
        "_cap",
        "_min_match",
        "_predicted",
        "is_waiting",
        "max_tokens",
        "num_accepted",
        "num_missing",
        "num_rejected",
    )

    def __init__(self, max_tokens: int, prompt: Sequence[int] = (), prediction: Sequence[int] = ()) -> None:
        """max_tokens: the longest draft, 0 for none; prediction: what may follow `prompt`."""
        self.max_tokens = self._cap = max_tokens
        self._min_match = MIN_MATCH
        self._predicted = np.array([*prompt[-_PROMPT_END:], *prediction, -1], np.int32) if prediction else None
        self.num_accepted = self.num_rejected = 0
        self.is_waiting = False
        """True if the device has a draft of the draft model for the next tokens."""
        self.num_missing = 0
        """Computed tokens that the draft model has not seen."""

    def draft(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """Return up to `count` tokens that may follow all known `tokens` of the request."""
        known = tokens if self._predicted is None else np.concatenate([self._predicted, tokens])
        return continuation(known, count, self._min_match)

    def count(self, num_accepted: int, num_rejected: int) -> None:
        """Count the tokens of a draft."""
        self.num_accepted += num_accepted
        self.num_rejected += num_rejected

    def begin_step(self, kind: ProgramKind, num_steps: int) -> None:
        """Count a step of an engine with a draft model.

        Decode steps leave the draft model out; it has seen the newest token only if it has just drafted.
        """
        if kind == "decode":
            self.num_missing += max(0, num_steps - self.is_waiting)
        self.is_waiting = kind == "speculate"

    def restart(self) -> None:
        """Forget what the draft model has seen: all tokens are computed again."""
        self.is_waiting, self.num_missing = False, 0

    def learn(self, num_accepted: int) -> None:
        """Adapt the next draft: at most twice as long as the accepted part plus one token.

        If no token was accepted, twice as many tokens must match: texts that only look alike soon get no drafts.
        """
        self.max_tokens = min(2 * num_accepted + 1, self._cap)
        self._min_match = MIN_MATCH if num_accepted else min(2 * self._min_match, MAX_MATCH)
