"""Hyper-connections of a decoder's residual streams, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HyperConfig:
    """Several residual streams: a block reads a weighted sum of them, and each gets a share of what it makes (arXiv 2409.19606).

    The weights of a token are computed from all of its streams.
    """

    num_streams: int  # A
    eps: float
    """Added to the weights of the sum that a block reads, and to what divides in `num_sinkhorn_steps`."""
    share_scale: float
    """Largest share of a block's output that a stream gets."""
    share_eps: float = 0.0
    """Added to the shares (Hy4)."""
    num_sinkhorn_steps: int = 0
    """Steps that make the matrix which mixes the streams of a token doubly stochastic (DeepSeek-V4); 0: streams are not mixed (Hy4)."""
    gate_rank: int | None = None
    """Rank of the gates on each number of the streams, which are normalised before a block reads their mean (Qwen4-Exp); None: a block
    reads a sum with one weight for each stream."""
    has_head: bool = True
    """False: the streams after the last layer are averaged, instead of weighted by a matmul of them (GLM-5.3)."""
