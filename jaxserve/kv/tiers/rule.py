"""Decides whether fetching a prefix pays against computing it.

    fetch if   seconds per fetched page (of the slowest tier with pages of the prefix)  x  pages
             < seconds per computed token  x  tokens that need not be computed

A snapshot of recurrent states counts as the pages that have as many bytes.

Both sides are running means, in which an observation loses half its weight within about 20 others:

- a page of a tier: the time from the begin of a fetch until its pages are ready for the device, divided by its pages. This
  includes bytes over bandwidth, the wait for a thread, the checksum and the round trips, as requests see them;
- a token: the device time of a step that computes prompts, divided by its tokens.

A tier that was not measured yet counts as fast, so it is measured by its first fetch, also by one that is given up without a
page. A tier that does not pay is tried again after every 32 refusals, because its speed may have changed. The tokens of a
request are the same either way: a fetched page holds the bytes that were computed for the same tokens by the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_KEPT: Final = 0.966
"""Weight of the past for every new observation: 0.966 ** 20 is a half."""
_TRY_AGAIN_AFTER: Final = 32


class RunningMean:
    """Seconds per unit, from observations of several units each."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def add(self, units: int, seconds: float) -> None:
        self._seconds = self._seconds * _KEPT + seconds
        self._units = self._units * _KEPT + units

    @property
    def value(self) -> float | None:
        """None without an observation."""
        return self._seconds / self._units if self._units else None


class FetchRule:
    """The running means of one engine. Any thread may ask; the engine's observes.

    always: True fetches whatever the means say.
    """

    def __init__(self, block_size: int, *, always: bool = False) -> None:
        self._block_size = block_size
        self._always = always
        self._pages: dict[str, RunningMean] = {}
        self._token = RunningMean()
        self._num_refused: dict[str, int] = {}

    def observe_fetch(self, tiers: Sequence[str], seconds: float) -> None:
        """Count a fetch of one page of each of these tiers for the slowest of them."""
        if tiers:
            slowest = self._slowest(tiers)
            self._pages.setdefault(slowest, RunningMean()).add(len(tiers), seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Count a step that computed prompts."""
        self._token.add(num_tokens, seconds)

    def pays(self, tiers: Sequence[str], num_saved: int | None = None) -> bool:
        """Return True if pages of these tiers, one each, should be fetched.

        num_saved: pages that need not be computed then; None: the fetched ones.
        """
        if not tiers:
            return False
        slowest = self._slowest(tiers)
        page_s, token_s = self.page_seconds(slowest), self.token_seconds
        if self._always or page_s is None or token_s is None:
            return True
        num_saved = len(tiers) if num_saved is None else num_saved
        if page_s * len(tiers) < token_s * self._block_size * num_saved:
            return True
        self._num_refused[slowest] = (self._num_refused.get(slowest, 0) + 1) % (_TRY_AGAIN_AFTER + 1)
        return self._num_refused[slowest] == 0

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds per computed token; None before the first."""
        return self._token.value

    def page_seconds(self, tier: str) -> float | None:
        """Return the mean seconds per fetched page; None before the first."""
        mean = self._pages.get(tier)
        return None if mean is None else mean.value

    def _slowest(self, tiers: Sequence[str]) -> str:
        """Return the tier with the largest mean; one that was not measured counts as the largest."""
        return max(sorted(set(tiers)), key=lambda tier: self.page_seconds(tier) or float("inf"))
