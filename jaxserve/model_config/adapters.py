"""Space for LoRA adapters in a decoder, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Space reserved for LoRA adapters."""

    count: int
    rank: int
    """Rank reserved for each adapter; smaller adapters are padded with zeros."""
    modules: tuple[str, ...]
    """Names in the decoder of every module that at least one adapter changes. One module holds a projection of all experts
    of a layer: its name has no expert's number."""

    @property
    def num_ranks(self) -> int:
        """Total rank of all adapters."""
        return self.count * self.rank
