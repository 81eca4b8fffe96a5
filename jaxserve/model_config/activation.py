"""The activations of feed-forward blocks."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]
"""gelu_tanh: the approximation of GELU with a hyperbolic tangent. quick_gelu: that with a sigmoid. relu2: the square of ReLU (Nemotron-H). xielu: xIELU
(arXiv 2411.13010), whose numbers each layer of a checkpoint has (Apertus)."""
