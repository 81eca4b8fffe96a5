"""Attention within segments of a flat axis, in both directions, without a cache."""

from jaxserve_kernels.segment_attention.api import attend_segments, has_kernel
from jaxserve_kernels.segment_attention.reference import QUERY_BLOCK

__all__ = ["QUERY_BLOCK", "attend_segments", "has_kernel"]
