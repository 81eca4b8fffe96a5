"""Paged attention on TPUs, with the writing of new keys and values."""

from __future__ import annotations

from jaxserve_kernels.paged_attention.tpu.api import pool_head_dim, supports, write_and_attend

__all__ = ["pool_head_dim", "supports", "write_and_attend"]
