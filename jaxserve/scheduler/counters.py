"""What the scheduler counts between two `EngineStats`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from jaxserve.ipc.messages import EngineStats


@dataclass(slots=True)
class Counters:
    """Increments; replaced by a fresh one when they are reported."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_jump_forward_tokens: int = 0
    """Those among them that a grammar left no choice about."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of drafts: those that were sampled, too."""

    def count_prefix(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """A request started: its prompt tokens were asked for, so many were there."""
        self.prefix_cache_queries += num_prompt_tokens
        self.prefix_cache_hits += num_cached_tokens

    def count_draft(self, num_tokens: int, num_accepted: int) -> None:
        """So many tokens were guessed, and so many of them right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted

    def stats(self, num_running: int, num_waiting: int, kv_cache_usage: float) -> EngineStats:
        """The counts together with the gauges."""
        return EngineStats(num_running, num_waiting, kv_cache_usage, **asdict(self))
