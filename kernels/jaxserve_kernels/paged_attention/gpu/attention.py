"""The two Hopper kernels of the functions of `api`.

They are jitted: a program that calls one for each of its layers traces and lowers it once.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.devices import multiprocessors
from jaxserve_kernels.paged_attention.gpu import decode, prefill
from jaxserve_kernels.paged_attention.layout import Ragged, Tiling
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import decode_tuning, prefill_tuning

_DEVICE = "h200"
"""The device whose block sizes are taken. Programs are as many as this device has multiprocessors."""

_STATIC = ("scoring", "is_emulated")

TILING = Tiling(prefill.QUERIES_PER_TILE, prefill.ALIGNMENT)
"""Tiling of segments for `mixed_attention`."""


@functools.partial(jax.jit, static_argnames=_STATIC)
def decode_attention(
    q: Float[Array, "B N H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None = None,
    is_emulated: bool = False,
) -> Float[Array, "B N H"]:
    """See `api.decode_attention`."""
    tuned = decode_tuning(_DEVICE, q.shape[-1], k_pages.dtype.itemsize)
    tuned = replace(tuned, programs=multiprocessors(tuned.programs))
    pool = (k_pages, v_pages, layer, block_tables, kv_lengths)
    return decode.decode(q, *pool, scoring=scoring, sinks=sinks, tuning=tuned, is_emulated=is_emulated)


@functools.partial(jax.jit, static_argnames=_STATIC)
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
    is_emulated: bool = False,
) -> Float[Array, "T N H"]:
    """See `api.mixed_attention`; `ragged` has to be cut by `TILING`."""
    num_tokens, num_rows = q.shape[0], kv_lengths.shape[0]
    pool = (k_pages, v_pages, layer, block_tables)
    options: dict[str, Any] = {"scoring": scoring, "sinks": sinks, "is_emulated": is_emulated}
    tuned = prefill_tuning(_DEVICE, q.shape[-1], k_pages.dtype.itemsize)
    tuned = replace(tuned, programs=multiprocessors(tuned.programs))
    segments = prefill.prefill(q, *pool, kv_lengths, ragged, tuning=tuned, **options)
    is_decode = jnp.arange(num_rows) < ragged.num_decode_rows
    singles = decode_attention(q[:num_rows], *pool, jnp.where(is_decode, kv_lengths, 0), **options)
    # Tokens after the last segment are unwritten.
    token = jnp.arange(num_tokens)[:, None, None]
    segments = jnp.where(token < ragged.query_starts[-1], segments, jnp.zeros_like(segments))
    singles = jnp.pad(singles, ((0, num_tokens - num_rows), (0, 0), (0, 0)))
    return jnp.where(token < ragged.num_decode_rows, singles, segments)
