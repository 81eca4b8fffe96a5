"""Static options of attention, beyond its operands: one value for every token of a layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scores of queries and keys, and the keys that a query sees."""

    scale: float
    softcap: float | None = None
    """c: a score s becomes c * tanh(s / c) (Gemma 2, arXiv 2408.00118)."""
    sliding_window: int | None = None
    """Keys that a query sees, its own included; None: all before it."""
    is_chunked: bool = False
    """True: a query sees the keys from the last multiple of `sliding_window` on (Llama 4). Not by Pallas kernels."""
