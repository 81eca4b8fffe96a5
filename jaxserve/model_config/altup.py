"""Alternating updates (AltUp) of a decoder's residual stream, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Several residual streams of which every layer computes one and corrects the others (arXiv 2301.13310)."""

    num_streams: int  # A
    active: int
    """The stream that layers compute."""
    scales_active: bool = True
    """True: the active stream is multiplied with a vector of the layer before per-layer embeddings gate it."""
