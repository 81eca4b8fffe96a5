"""A request as a router sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.kv.block_table import HashChain
from jaxserve.types import BlockHash

_IDS_AT_ONCE: Final = 1 << 16
"""Token ids that are copied to an array with the interpreter's lock held: 0.7 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """The properties of a request that a policy may use."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens to expect; see `ReplyLengths`."""
    pages: tuple[BlockHash, ...] = ()
    """Hashes of the prompt's pages that a replica may have cached, the first page first; see `page_hashes`."""
    block_size: int = 16
    """Tokens per page."""
    text: str = ""
    """The prompt's text, for the policy that compares texts."""


def page_hashes(
    tokens: np.ndarray, block_size: int, salt: str | None = None, adapter: int = 0
) -> tuple[BlockHash, ...]:
    """Return the hashes under which an engine caches the pages of a prompt, the first page first.

    At least one token of a prompt is always computed, so the page that its last token fills is left out.

    tokens: int32 of shape [num_prompt_tokens]. block_size, salt, adapter: as in the engine's `HashChain`.
    """
    chain = HashChain(block_size, salt, adapter)
    return tuple(chain.hash(index, tokens) for index in range((len(tokens) - 1) // block_size))


def prompt_hashes(
    prompt: Sequence[int], block_size: int, salt: str | None = None, adapter: int = 0
) -> tuple[BlockHash, ...]:
    """Return `page_hashes` of a list of token ids, which takes 40 ms for 500,000 of them.

    A thread that calls it leaves the interpreter's lock to others in between.
    """
    tokens = np.empty(len(prompt), np.int32)
    for start in range(0, len(prompt), _IDS_AT_ONCE):
        tokens[start : start + _IDS_AT_ONCE] = prompt[start : start + _IDS_AT_ONCE]
    return page_hashes(tokens, block_size, salt, adapter)


class ReplyLengths:
    """Estimates the length of replies by the mean of those that have ended.

    The estimate moves by 1/64 of the difference to each new reply, so that it follows a change of the traffic.
    """

    _SHARE = 1 / 64

    def __init__(self, first_estimate: float = 128.0) -> None:
        self._mean = first_estimate

    def record(self, num_tokens: int) -> None:
        """Count the reply of a request that has ended."""
        self._mean += self._SHARE * (num_tokens - self._mean)

    def expected(self, max_tokens: int) -> int:
        """Return the number of output tokens to expect of a request that may generate `max_tokens`."""
        return max(1, min(max_tokens, round(self._mean)))
