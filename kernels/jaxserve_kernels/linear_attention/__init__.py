"""Linear attention with decay: the gated delta rule and Mamba-2's state space duality."""

from jaxserve_kernels.linear_attention.api import linear_attention, takes_tokens_in_turn
from jaxserve_kernels.states import PooledStates

__all__ = ["PooledStates", "linear_attention", "takes_tokens_in_turn"]
