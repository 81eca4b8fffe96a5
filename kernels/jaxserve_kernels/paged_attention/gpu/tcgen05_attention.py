"""The functions of `api` for compute capability 10.x: segments on `tcgen05.mma`, single queries on `mma.sync`.

Decode is bound by memory, which `mma.sync` keeps up with. They are jitted: a program that calls one for each of its layers
traces and lowers it once.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.devices import multiprocessors
from jaxserve_kernels.paged_attention.gpu import tcgen05
from jaxserve_kernels.paged_attention.gpu.mma_attention import decode_attention
from jaxserve_kernels.paged_attention.layout import Ragged, Tiling
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import prefill_tuning

__all__ = ["TILING", "decode_attention", "mixed_attention"]

_DEVICE = "b200"
"""The device whose block sizes are taken. Programs are as many as this device has multiprocessors."""

TILING = Tiling(tcgen05.QUERIES_PER_TILE, tcgen05.ALIGNMENT)
"""Tiling of segments for `mixed_attention`."""


@functools.partial(jax.jit, static_argnames=("scoring",))
def mixed_attention(
    q: Float[Array, "T N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "T N H"]:
    """See `api.mixed_attention`; `ragged` has to be cut by `TILING`."""
    num_tokens, num_rows = q.shape[0], kv_lengths.shape[0]
    pool = (k_pages, v_pages, layer, block_tables)
    tuned = prefill_tuning(_DEVICE, q.shape[-1], k_pages.dtype.itemsize)
    tuned = replace(tuned, programs=multiprocessors(tuned.programs))
    segments = tcgen05.prefill(q, *pool, kv_lengths, ragged, scoring=scoring, sinks=sinks, tuning=tuned)
    is_decode = jnp.arange(num_rows) < ragged.num_decode_rows
    decoding = jnp.where(is_decode, kv_lengths, 0)
    singles = decode_attention(q[:num_rows], *pool, decoding, scoring=scoring, sinks=sinks)
    # Tokens after the last segment are unwritten.
    token = jnp.arange(num_tokens)[:, None, None]
    segments = jnp.where(token < ragged.query_starts[-1], segments, jnp.zeros_like(segments))
    singles = jnp.pad(singles, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where(token < ragged.num_decode_rows, singles, segments)
