"""Public entry of paged attention.

Letters: B rows, T tokens, N query heads, K kv heads, H head dim, L layers, P pages, S slots per page,
M pages per row at most. The pool of one model is two arrays `[L, P, K, S, H]` for all layers; ops take
the layer as an operand so that nothing of the pool's size is ever sliced or copied.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.kv_write import KVScales, stored
from jaxserve_kernels.kv_write.reference import kv_write as scatter
from jaxserve_kernels.paged_attention import bucketed, cpu, gpu, layout, reference, tpu
from jaxserve_kernels.paged_attention.layout import Paging, Ragged, from_pool_heads, pool_heads, to_pool_heads
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.sharded import AttentionKernel, Results, ShardAxes, over_mesh
from jaxserve_kernels.rope import Rotation, rotate

__all__ = [
    "Paging",
    "Ragged",
    "Scoring",
    "ShardAxes",
    "decode_attention",
    "mixed_attention",
    "pool_heads",
    "ragged_layout",
    "unsupported",
    "write",
    "write_and_attend",
]

_ON_GPU = ("mosaic_gpu", "mosaic_gpu_mma", "mosaic_gpu_tcgen05")


def unsupported(
    backend: Backend,
    num_heads: int,
    pool_shape: tuple[int, ...],
    dtype: jnp.dtype,
    kv_dtype: jnp.dtype,
    shared_bytes: int | None = None,
) -> str | None:
    """Return in a few words why `backend` has no kernel for a pool `[L, P, K, S, H]` and these types; None if it has one.

    shared_bytes: shared memory of one block, for `mosaic_gpu_mma`, which runs on devices that differ in it.
    """
    if backend == "mosaic_gpu_tcgen05":
        return gpu.unsupported_tcgen05(num_heads, pool_shape, dtype, kv_dtype, shared_bytes)
    if backend == "mosaic_gpu_mma":
        return gpu.unsupported_mma(num_heads, pool_shape, dtype, kv_dtype, shared_bytes)
    if backend == "mosaic_gpu":
        return gpu.unsupported(num_heads, pool_shape, dtype, kv_dtype)
    if backend == "mosaic_tpu":
        return tpu.unsupported(pool_shape, dtype, kv_dtype)
    return None


def is_native(num_heads: int, pool_shape: tuple[int, ...], kv_dtype: jnp.dtype, scoring: Scoring) -> bool:
    """Return True if the native kernel attends over a pool `[L, P, K, S, H]`; XLA does otherwise, also with a native backend."""
    return cpu.supports(num_heads, pool_shape, kv_dtype, scoring)


def ragged_layout(
    query_starts: Int[Array, "B1"],
    num_decode_rows: Int[Array, ""],
    *,
    num_tokens: int,
    backend: Backend = "reference",
) -> Ragged:
    """Cut a step's segments as the backend's `mixed_attention` takes them."""
    return layout.ragged_layout(query_starts, num_decode_rows, num_tokens=num_tokens, tiling=_tiling(backend))


def write_and_attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Num[Array, "L P K2 S H2"],
    v_pages: Num[Array, "L P K2 S H2"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    scoring: Scoring,
    rotation: Rotation | None = None,
    sinks: Float[Array, "N"] | None = None,
    scales: KVScales | None = None,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
    is_written: bool = False,
    has_short_rows: bool = False,
) -> tuple[Float[Array, "T N H"], Num[Array, "L P K2 S H2"], Num[Array, "L P K2 S H2"]]:
    """Rotate, put the tokens' keys and values into their pages, then attend; returns the pools as well.

    One op, because a backend may keep pages in an order of its own: all of a pool's reads and writes have
    to go through the same backend. Under donation the pools are the same buffers. Without `rotation` queries and
    keys are taken as they are. `scales` go with a pool of 8-bit numbers. A pool may have fewer and wider
    heads than the operands (see `pool_heads`). shards: what the devices of the mesh in context split. is_written: another
    layer wrote the tokens' keys and values; `k` and `v` then count for their shapes only. Not on `mosaic_tpu`, whose
    kernel attends to a token's key before it is in its page. has_short_rows: rows have few tokens; kernels without `key_ends`
    then take each token for a row of its own.
    """
    is_native = backend in NATIVE and cpu.supports(q.shape[1], k_pages.shape, k_pages.dtype, scoring)
    if is_native and (scales is None or k_pages.dtype.itemsize == 1):
        if is_written:  # the kernel always writes: into the null page, as for padding
            paging = paging._replace(pages=jnp.zeros_like(paging.pages))
        where = (paging.block_tables, paging.kv_lengths, paging.query_starts, paging.pages, paging.slots)
        options: dict[str, Any] = {"rotation": rotation, "scoring": scoring, "sinks": sinks}
        options |= {"key_ends": paging.key_ends, "scales": scales}
        return cpu.write_and_attend(q, k, v, k_pages, v_pages, layer, *where, **options)
    if paging.key_ends is not None and has_short_rows and scoring.sliding_window is None and backend != "mosaic_tpu":
        paging = layout.rows_of_tokens(paging, paging.key_ends)
    elif paging.key_ends is not None:
        backend = "reference"  # no Pallas kernel has them; the pools of all of these are alike
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    num_kv_heads, dim, group = k.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    if scales is not None:  # a score is linear in its key, and the result in the values
        q = (q * jnp.repeat(scales.by_number.k, group, axis=0)).astype(q.dtype)
    q, k, v = to_pool_heads(q, *stored(k, v, k_pages.dtype, scales), k_pages.shape)
    attend = _kernel(backend, scoring, shards, is_written=is_written)
    out, k_pages, v_pages = attend(q, k, v, k_pages, v_pages, layer, paging, sinks)
    out = from_pool_heads(out, num_kv_heads, dim, k_pages.shape)
    if scales is not None:
        out = (out * jnp.repeat(scales.by_number.v, group, axis=0)).astype(q.dtype)
    return out, k_pages, v_pages


def write(
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    k_pages: Num[Array, "L P K2 S H2"],
    v_pages: Num[Array, "L P K2 S H2"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    num_heads: int,
    scoring: Scoring,
    rotation: Rotation | None = None,
    scales: KVScales | None = None,
    backend: Backend = "reference",
    shards: ShardAxes = ShardAxes(),  # noqa: B008  (immutable)
) -> tuple[Num[Array, "L P K2 S H2"], Num[Array, "L P K2 S H2"]]:
    """Rotate keys, and put the tokens' keys and values into their pages, as `write_and_attend` does; returns the pools.

    num_heads, scoring: those with which calls of `write_and_attend` read the pool.
    """
    is_native = backend in NATIVE and cpu.supports(num_heads, k_pages.shape, k_pages.dtype, scoring)
    if is_native and (scales is None or k_pages.dtype.itemsize == 1):
        none, starts = jnp.zeros_like(paging.kv_lengths), jnp.zeros_like(paging.query_starts)
        where = (paging.block_tables, none, starts, paging.pages, paging.slots)  # no row attends
        options: dict[str, Any] = {"rotation": rotation, "scoring": scoring, "sinks": None, "scales": scales}
        return cpu.write_and_attend(jnp.zeros_like(k), k, v, k_pages, v_pages, layer, *where, **options)[1:]
    if rotation is not None:
        k = rotate(k, rotation)
    _, k, v = to_pool_heads(k, *stored(k, v, k_pages.dtype, scales), k_pages.shape)
    kernel = over_mesh(_write, shards) if shards.pages else _write
    return kernel(k, k, v, k_pages, v_pages, layer, paging._replace(ragged=None, key_ends=None), None)[1:]


def _write(
    q: Num[Array, "T K H"],
    k: Num[Array, "T K H"],
    v: Num[Array, "T K H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    paging: Paging,
    sinks: Float[Array, "N"] | None,
) -> Results:
    """Implement `AttentionKernel` without attending."""
    return q, *scatter(k_pages, v_pages, layer, k, v, paging.pages, paging.slots)


def _kernel(backend: Backend, scoring: Scoring, shards: ShardAxes, *, is_written: bool) -> AttentionKernel:
    """Writes and attends. XLA splits its own operations over the devices of a mesh by heads, but no kernel, nor pages."""
    if scoring.is_chunked and backend in (*_ON_GPU, "mosaic_tpu"):
        raise ValueError(f"{backend}: no kernel for attention in chunks")
    if backend == "mosaic_tpu":
        if is_written:
            raise ValueError("mosaic_tpu: no kernel that attends without writing")
        from jaxserve_kernels.paged_attention.tpu import fused

        return over_mesh(functools.partial(fused.write_then_attend, scoring=scoring, chip=fused.this_chip()), shards)
    kernel = functools.partial(_write_then_attend, scoring=scoring, backend=backend, is_written=is_written)
    if backend not in _ON_GPU and not shards.pages:
        return kernel
    return over_mesh(kernel, shards, _tiling(backend))


def _write_then_attend(
    q: Float[Array, "T N H"],
    k: Num[Array, "T K H"],
    v: Num[Array, "T K H"],
    k_pages: Num[Array, "L P K S H"],
    v_pages: Num[Array, "L P K S H"],
    layer: Int[Array, ""],
    paging: Paging,
    sinks: Float[Array, "N"] | None,
    *,
    scoring: Scoring,
    backend: Backend,
    is_written: bool,
) -> Results:
    if not is_written:
        k_pages, v_pages = scatter(k_pages, v_pages, layer, k, v, paging.pages, paging.slots)
    pool = (k_pages, v_pages, layer, paging.block_tables, paging.kv_lengths)
    options: dict[str, Any] = {"scoring": scoring, "sinks": sinks, "backend": backend}
    if paging.ragged is None:
        return decode_attention(q, *pool, **options), k_pages, v_pages
    return mixed_attention(q, *pool, paging.ragged, key_ends=paging.key_ends, **options), k_pages, v_pages


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
    backend: Backend = "reference",
) -> Float[Array, "B N H"]:
    """One query token per row, at position `kv_lengths - 1`, over that row's first `kv_lengths` keys.

    A row of length 0 (padding) gives zeros. sinks: a logit per head that takes its share of the softmax and gives
    nothing.
    """
    attend = _kernels(backend).decode_attention
    out: Array = attend(q, k_pages, v_pages, layer, block_tables, kv_lengths, scoring=scoring, sinks=sinks)
    return out


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
    key_ends: Int[Array, "T"] | None = None,
    backend: Backend = "reference",
) -> Float[Array, "T N H"]:
    """Attend with query segments of a flat token axis, each causal over its own row's keys unless `key_ends` says more.

    Row b's queries stand at `ragged.query_starts[b] : ragged.query_starts[b + 1]`, the last one at
    position `kv_lengths[b] - 1`. The first `ragged.num_decode_rows` rows have one query each. Tokens
    after the last segment (padding) come out finite and meaningless. `ragged` is cut for the same backend.
    key_ends: see `Paging.key_ends`; for the backend "reference" only.
    """
    if key_ends is not None:
        segments = (block_tables, kv_lengths, ragged)
        return reference.mixed_attention(
            q, k_pages, v_pages, layer, *segments, scoring=scoring, sinks=sinks, key_ends=key_ends
        )
    attend = _kernels(backend).mixed_attention
    out: Array = attend(q, k_pages, v_pages, layer, block_tables, kv_lengths, ragged, scoring=scoring, sinks=sinks)
    return out


def _tiling(backend: Backend) -> layout.Tiling | None:
    """`mosaic_gpu_mma` cuts segments itself."""
    return _kernels(backend).TILING if backend in ("mosaic_gpu", "mosaic_gpu_tcgen05") else None


def _kernels(backend: Backend) -> ModuleType:
    """Pallas is imported where a program for a GPU is made, and nowhere else."""
    if backend == "mosaic_gpu":
        from jaxserve_kernels.paged_attention.gpu import attention

        return attention
    if backend == "mosaic_gpu_tcgen05":
        from jaxserve_kernels.paged_attention.gpu import tcgen05_attention

        return tcgen05_attention
    if backend == "mosaic_gpu_mma":
        from jaxserve_kernels.paged_attention.gpu import mma_attention

        return mma_attention
    return bucketed if backend == "bucketed" else reference
