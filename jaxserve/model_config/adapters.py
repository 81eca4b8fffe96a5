"""LoRA adapters served with a model, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Space reserved for LoRA adapters."""

    count: int
    rank: int
    """Rank reserved for each adapter; smaller adapters are padded with zeros."""
    modules: tuple[str, ...]
    """Checkpoint names of every module that at least one adapter changes."""

    @property
    def num_ranks(self) -> int:
        """Total rank of all adapters."""
        return self.count * self.rank
