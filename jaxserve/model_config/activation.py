"""The activations of feed-forward blocks."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""gelu_tanh: the approximation of GELU with a hyperbolic tangent."""
