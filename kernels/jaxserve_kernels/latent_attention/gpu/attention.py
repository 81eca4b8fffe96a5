"""The Hopper kernel of `api`, and the reference for segments.

Decode attention is jitted: a program that calls it for each of its layers traces and lowers it once.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.devices import multiprocessors
from jaxserve_kernels.latent_attention.gpu import decode
from jaxserve_kernels.latent_attention.tuning import decode_tuning
from jaxserve_kernels.paged_attention import reference
from jaxserve_kernels.paged_attention.layout import Ragged
from jaxserve_kernels.paged_attention.options import Scoring

_DEVICE = "h200"
"""The device whose block sizes are taken. Programs are as many as this device has multiprocessors."""


@functools.partial(jax.jit, static_argnames=("value_width", "scoring", "is_emulated"))
def decode_attention(
    q: Float[Array, "B N W"],
    pages: Float[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    *,
    value_width: int,
    scoring: Scoring,
    is_emulated: bool = False,
) -> Float[Array, "B N V"]:
    """See `api.decode_attention`."""
    tuned = decode_tuning(_DEVICE, q.shape[-1], pages.dtype.itemsize)
    tuned = replace(tuned, programs=multiprocessors(tuned.programs))
    pool = (pages, layer, block_tables, kv_lengths)
    return decode.decode(q, *pool, value_width=value_width, scoring=scoring, tuning=tuned, is_emulated=is_emulated)


def mixed_attention(
    q: Float[Array, "T N W"],
    pages: Float[Array, "L P 1 S W"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    ragged: Ragged,
    *,
    value_width: int,
    scoring: Scoring,
    is_emulated: bool = False,
) -> Float[Array, "T N V"]:
    """See `api.mixed_attention`: rows of one token by the kernel, the others by the reference."""

    def decode_rows(q: Array, k_pages: Array, v_pages: Array, *where: Array, **_: Any) -> Array:
        options: dict[str, Any] = {"value_width": value_width, "scoring": scoring, "is_emulated": is_emulated}
        found = decode_attention(q, k_pages, *where, **options)
        return jnp.pad(found, ((0, 0), (0, 0), (0, q.shape[-1] - value_width)))

    where = (layer, block_tables, kv_lengths, ragged)
    out = reference.mixed_attention(q, pages, pages, *where, scoring=scoring, decode=decode_rows)
    return out[..., :value_width]
