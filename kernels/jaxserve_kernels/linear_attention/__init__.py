"""Linear attention with decay: the gated delta rule and Mamba-2's state space duality."""

from jaxserve_kernels.linear_attention.api import linear_attention

__all__ = ["linear_attention"]
