"""Sessions: conversations whose prompts repeat everything said before. Token ids are made when a request arrives."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import shake_128

import numpy as np

from benchmarks.simulator.device import REPLY_TOKEN
from jaxserve.kv.block_table import HashChain


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    num_new_tokens: int
    """Prompt tokens after those of the turn before and its reply; in the first turn, after the shared prefix."""
    num_output_tokens: int
    wait_s: float
    """Seconds from the end of the turn before until this one arrives; 0 in the first turn."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation: a prefix that other sessions have as well, and turns."""

    key: int
    """Different for every session of a run."""
    arrival_s: float
    prefix: int
    """Number of the shared prefix."""
    num_prefix_tokens: int
    turns: tuple[Turn, ...]


class Conversation:
    """A session under way: the tokens of its next prompt."""

    def __init__(self, session: Session, block_size: int) -> None:
        self.session = session
        self.num_turns = 0
        """Turns that have arrived."""
        self._tokens = segment_tokens(session.prefix, 0, session.num_prefix_tokens)
        self._reply = 0
        self.chain = HashChain(block_size, None)
        """The hashes of its pages. Router and engines share it, since no token of a conversation changes."""

    @property
    def next_turn(self) -> Turn | None:
        turns = self.session.turns
        return turns[self.num_turns] if self.num_turns < len(turns) else None

    def take_prompt(self) -> tuple[np.ndarray, int]:
        """Return the tokens of the next prompt, int32, and the length of its reply. Raises IndexError after the last."""
        turn = self.session.turns[self.num_turns]
        self.num_turns += 1
        own = segment_tokens(self.session.key, self.num_turns, turn.num_new_tokens)
        self._tokens = np.concatenate([self._tokens, np.full(self._reply, REPLY_TOKEN, np.int32), own])
        self._reply = turn.num_output_tokens
        return self._tokens, turn.num_output_tokens


def segment_tokens(key: int, part: int, count: int) -> np.ndarray:
    """Return `count` pseudo-random token ids of 0 to 255, int32, which differ for each (key, part).

    Small numbers, since Python makes no objects for them.
    """
    digest = shake_128(b"%d/%d" % (key, part)).digest(count)
    return np.frombuffer(digest, np.uint8).astype(np.int32)


def text_of(tokens: np.ndarray) -> str:
    """Return a text with four characters for each token, as English has on average."""
    return tokens.tobytes().decode("latin-1")
