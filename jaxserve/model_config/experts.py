"""The mixture-of-experts block of a decoder layer, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gate * sigmoid(slope * gate) * (up + 1), with the gate at most `limit` and up within ±`limit` (gpt-oss)."""

    limit: float
    slope: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Routed experts of one layer, of which each token uses the best few."""

    num_experts: int  # E
    num_per_token: int  # k
    """Experts per token (top-k)."""
    intermediate_size: int  # F
    """Width of one expert."""
    is_normalized: bool
    """True if the weights of a token's k experts add up to 1; otherwise those of all E experts would."""
    has_biases: bool = False
    """True if the router and every matmul of an expert have a bias."""
    clamp: ClampedGate | None = None
    """None: activation(gate) * up."""
