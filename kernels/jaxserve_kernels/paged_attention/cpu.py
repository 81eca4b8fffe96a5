"""Writing a step's KV and attending by the native kernel, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.rope import Rotation

_TARGETS = {"float32": "jaxserve_attention", "int8": "jaxserve_attention_int8", "uint8": "jaxserve_attention_e4m3"}
"""Kernels by the type of the pool; uint8: the bits of e4m3."""
_LANES = 16
_MOST_GROUPED = 48
_NO_WINDOW = 1 << 30


def supports(num_heads: int, pool_shape: tuple[int, ...], dtype: jnp.dtype, scoring: Scoring) -> bool:
    """Return True if the kernel serves a pool of this shape `[L, P, K, S, H]` and type.

    A model uses softcaps in all of its layers or in none, so all of its layers get the same answer.
    """
    _, _, kv_heads, page_size, dim = pool_shape
    return (
        str(dtype) in _TARGETS
        and page_size % _LANES == 0
        and dim % _LANES == 0
        and num_heads // kv_heads <= _MOST_GROUPED
        and scoring.softcap is None
    )


def write_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    block_tables: Int[Array, "B M"],
    kv_lengths: Int[Array, "B"],
    query_starts: Int[Array, "B1"],
    pages: Int[Array, "T"],
    slots: Int[Array, "T"],
    *,
    rotation: Rotation | None,
    scoring: Scoring,
    sinks: Float[Array, "N"] | None,
    key_ends: Int[Array, "T"] | None = None,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "T N H"], Num[Array, "L P K S H"], Num[Array, "L P K S H"]]:
    """See `api.write_and_attend`. A page of keys is kept as `[H, S]`: only this kernel reads such a pool.

    scales: of a pool of 8-bit numbers.
    """
    shapes = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (k_pages, v_pages))
    results = jax.ShapeDtypeStruct(q.shape, jnp.float32), *shapes
    call = jax.ffi.ffi_call(_TARGETS[str(k_pages.dtype)], results, input_output_aliases={3: 1, 4: 2})
    wide = (array.astype(jnp.float32) for array in (q, k, v))
    rest: list[Array] = []
    if k_pages.dtype.itemsize == 1:
        by_number = (1, 1) if scales is None else scales.by_number
        rest += [jnp.broadcast_to(jnp.asarray(each, jnp.float32), k.shape[1:]) for each in by_number]
    if key_ends is not None:
        rest.append(key_ends.astype(jnp.int32))
    if rotation is None:
        nothing = jnp.zeros((0, q.shape[2] // 2), jnp.float32)
        rotation = Rotation(nothing, nothing)
    indices = (block_tables, kv_lengths, query_starts, pages, slots)
    out, k_pages, v_pages = call(
        *wide,
        k_pages,
        v_pages,
        jnp.asarray(layer, jnp.int32),
        *(index.astype(jnp.int32) for index in indices),
        *rotation,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        *rest,
        scale=np.float32(scoring.scale),
        window=np.int32(_NO_WINDOW if scoring.sliding_window is None else scoring.sliding_window),
        is_chunked=np.int32(scoring.is_chunked),
    )
    return out.astype(q.dtype), k_pages, v_pages
