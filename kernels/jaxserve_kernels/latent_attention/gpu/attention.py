"""The Hopper kernel of the functions of `api`.

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
from jaxserve_kernels.latent_attention.gpu import decode
from jaxserve_kernels.latent_attention.gpu.query_tiles import make_query_tiles, num_tiles, tile_size
from jaxserve_kernels.latent_attention.tuning import decode_tuning
from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.layout import Ragged
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tuning import DecodeTuning

_DEVICE = "h200"
"""The device whose block sizes are taken. Programs are as many as this device has multiprocessors."""


_STATIC = ("value_width", "scoring", "tuning", "is_emulated")
_MOST_BYTES = 256 << 20
"""Most room for the results of parts of segments. Larger steps take the loop of the reference for segments."""


@functools.partial(jax.jit, static_argnames=_STATIC)
def decode_attention(
    q: Float[Array, "B N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    value_width: int,
    scoring: Scoring,
    tuning: DecodeTuning | None = None,
    is_emulated: bool = False,
) -> Float[Array, "B N V"]:
    """See `api.decode_attention`. tuning: None for that of the device."""
    pool = (pages, layer, block_tables, kv_lengths)
    options: dict[str, Any] = {"value_width": value_width, "scoring": scoring, "tuning": tuning or _tuning(pages)}
    return decode.decode(q, *pool, **options, is_emulated=is_emulated)


def mixed_attention(
    q: Float[Array, "T N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    value_width: int,
    scoring: Scoring,
    tuning: DecodeTuning | None = None,
    is_emulated: bool = False,
) -> Float[Array, "T N V"]:
    """See `api.mixed_attention`: by the kernel, segments of steps of many tokens by the reference. tuning: None for that of
    the device."""
    where, tuning = (layer, block_tables, kv_lengths), tuning or _tuning(pages)
    options: dict[str, Any] = {"value_width": value_width, "scoring": scoring, "tuning": tuning}
    options["is_emulated"] = is_emulated
    size = tile_size(len(q), len(kv_lengths), q.shape[1])
    rows, longest = num_tiles(len(q), len(kv_lengths), size), block_tables.shape[1] * pages.shape[3]
    if decode.part_bytes(rows, size * q.shape[1], value_width, longest, tuning) <= _MOST_BYTES:
        return _segments(q, pages, *where, ragged.query_starts, **options)

    def decode_rows(q: Array, k_pages: Array, v_pages: Array, *where: Array, **_: Any) -> Array:
        found = decode_attention(q, k_pages, *where, **options)
        return jnp.pad(found, ((0, 0), (0, 0), (0, q.shape[-1] - value_width)))

    out = reference.mixed_attention(q, pages, pages, *where, ragged, scoring=scoring, decode=decode_rows)
    return out[..., :value_width]


@functools.partial(jax.jit, static_argnames=_STATIC)
def _segments(
    q: Float[Array, "T N W"],
    pages: Num[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    query_starts: Int[Array, "B1"],
    *,
    value_width: int,
    scoring: Scoring,
    tuning: DecodeTuning,
    is_emulated: bool,
) -> Float[Array, "T N V"]:
    num_tokens, num_heads, _ = q.shape
    segments = make_query_tiles(query_starts, kv_lengths, num_tokens, num_heads)
    options: dict[str, Any] = {"value_width": value_width, "scoring": scoring, "tuning": tuning}
    pool = (pages, layer, block_tables, segments.tiles.ends)
    results = decode.decode(segments.cut(q), *pool, **options, segments=segments, is_emulated=is_emulated)
    return segments.put_together(results, num_heads)


def _tuning(pages: Array) -> DecodeTuning:
    tuned = decode_tuning(_DEVICE, pages.shape[-1], pages.dtype.itemsize)
    return replace(tuned, programs=multiprocessors(tuned.programs))
