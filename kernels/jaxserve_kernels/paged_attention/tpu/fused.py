"""A step's keys and values written into their pages, and its attention: three kernels in one call.

Rows with one token are written and attended by the decode kernel; of chunks, first all are written, then attended.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxserve_kernels.paged_attention.layout import Paging
from jaxserve_kernels.paged_attention.options import Scoring
from jaxserve_kernels.paged_attention.tpu.attention import Mask, NewTokens, attend
from jaxserve_kernels.paged_attention.tpu.plan import Chip, Plan, Shape, chunk_plan, decode_plan, this_chip, write_plan
from jaxserve_kernels.paged_attention.tpu.stream import IDS_PER_LINE
from jaxserve_kernels.paged_attention.tpu.units import chunk_units, decode_units
from jaxserve_kernels.paged_attention.tpu.write import page_writes, write_pages

Pools = tuple[Num[Array, "L P K S H"], Num[Array, "L P K S H"]]
Attended = tuple[Float[Array, "T N H"], Float[Array, "T N"], Pools]

__all__ = ["this_chip", "write_then_attend"]

_NOTHING_SEEN = -1e30
"""Logarithm of a sum without terms: finite, so that what is made of it is."""


@functools.partial(jax.jit, static_argnames=("scoring", "chip"))
def write_then_attend(
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
    chip: Chip,
) -> tuple[Float[Array, "T N H"], Num[Array, "L P K S H"], Num[Array, "L P K S H"]]:
    """Write the tokens' keys and values, which have the pool's type, and attend.

    Returns attention and the pools, under donation the same buffers. A token that sees nothing gets zeros. Padding of
    the heads has to be zero.
    """
    scaled = (q * scoring.scale).astype(q.dtype)
    mask = Mask(scoring.sliding_window, scoring.softcap)
    out, log_sum, pools = _all_rows(scaled, k, v, (k_pages, v_pages), layer, paging, mask, chip)
    if sinks is not None:  # one more term of the sum
        out = (out * jax.nn.sigmoid(log_sum - sinks)[..., None]).astype(q.dtype)
    return out, *pools


def _all_rows(
    q: Float[Array, "T N H"],
    k: Num[Array, "T K H"],
    v: Num[Array, "T K H"],
    pools: Pools,
    layer: Int[Array, ""],
    paging: Paging,
    mask: Mask,
    chip: Chip,
) -> Attended:
    """Attention with scores `q . k`, and the logarithm of each softmax's sum: very low where nothing is seen."""
    if paging.ragged is None:
        is_decode = jnp.ones(paging.kv_lengths.shape, bool)
        return _decode(q, k, v, pools, layer, paging, is_decode, mask, chip)
    rows = paging.kv_lengths.shape[0]
    is_decode = jnp.arange(rows) < paging.ragged.num_decode_rows
    decoded, decoded_sum, pools = _decode(q[:rows], k[:rows], v[:rows], pools, layer, paging, is_decode, mask, chip)
    out, log_sum, pools = _chunks(q, k, v, pools, layer, paging, ~is_decode, mask, chip)
    out = out.at[:rows].set(jnp.where(is_decode[:, None, None], decoded, out[:rows]))
    log_sum = log_sum.at[:rows].set(jnp.where(is_decode[:, None], decoded_sum, log_sum[:rows]))
    return out, log_sum, pools


def _decode(
    q: Float[Array, "B N H"],
    k: Num[Array, "B K H"],
    v: Num[Array, "B K H"],
    pools: Pools,
    layer: Int[Array, ""],
    paging: Paging,
    is_decode: Bool[Array, "B"],
    mask: Mask,
    chip: Chip,
) -> Attended:
    """The rows with one token each: token b is row b's."""
    shape = _shape(q, pools, paging)
    plan = decode_plan(shape, chip)
    rows, heads, dim = q.shape
    grouped = q.reshape(rows, shape.kv_heads, shape.group, dim)
    padding = ((0, 0), (0, 0), (0, plan.rows_per_token - shape.group), (0, 0))
    new_k, new_v = (x.astype(jnp.float32)[:, :, None] for x in (k, v))
    attended, sums, pools = attend(
        jnp.pad(grouped, padding),
        pools,
        layer,
        _lines(paging.block_tables),
        decode_units(is_decode, paging.kv_lengths, mask.sliding_window),
        NewTokens(new_k, new_v, paging.pages[:rows].astype(jnp.int32)),
        mask,
        plan,
        vmem_limit_bytes=plan.vmem_limit_bytes(shape, chip),
        cost=plan.cost(shape, rows),
    )
    is_written = (is_decode & (paging.kv_lengths > 0))[:, None, None]
    out = jnp.where(is_written, attended[:, :, : shape.group].reshape(q.shape), 0)
    log_sum = sums[:, :, 0, : shape.group].reshape(rows, heads)
    return out, jnp.where(is_written[..., 0], log_sum, _NOTHING_SEEN), pools


def _chunks(
    q: Float[Array, "T N H"],
    k: Num[Array, "T K H"],
    v: Num[Array, "T K H"],
    pools: Pools,
    layer: Int[Array, ""],
    paging: Paging,
    is_chunk: Bool[Array, "B"],
    mask: Mask,
    chip: Chip,
) -> Attended:
    """The rows with segments of tokens: first all are written, then each attends to its row's pages."""
    shape = _shape(q, pools, paging)
    tokens = q.shape[0]
    is_chunk &= (paging.query_starts[1:] > paging.query_starts[:-1]) & (paging.kv_lengths > 0)
    rows = (is_chunk, paging.kv_lengths, paging.query_starts)
    writes = page_writes(*rows, paging.block_tables, num_tokens=tokens, page_size=shape.page_size)
    new_k, new_v = (x.transpose(1, 0, 2) for x in (k, v))  # (K, T, H)
    plan, writing = chunk_plan(shape, chip, tokens), write_plan(shape, chip)
    limit = writing.vmem_limit_bytes(shape, chip)
    pools = write_pages((new_k, new_v), pools, layer, writes, head_splits=writing.head_splits, vmem_limit_bytes=limit)
    units = chunk_units(*rows, mask.sliding_window, num_tokens=tokens, tokens_per_tile=plan.tokens_per_tile)
    tiles = _to_tiles(q, shape, plan)
    attended, sums, pools = attend(
        tiles,
        pools,
        layer,
        _lines(paging.block_tables),
        units,
        None,
        mask,
        plan,
        vmem_limit_bytes=plan.vmem_limit_bytes(shape, chip),
        cost=plan.cost(shape, tiles.shape[0]),
    )
    visited = (jnp.arange(attended.shape[0])[:, None] == units.tiles) & (
        jnp.arange(units.tiles.shape[0]) < units.num_units
    )
    is_written = jnp.repeat(visited.any(1), plan.tokens_per_tile)[:tokens]
    out = _from_tiles(attended, shape, plan)[:tokens]
    log_sum = _from_tiles(sums.swapaxes(2, 3), shape, plan)[:tokens, :, 0]
    return (
        jnp.where(is_written[:, None, None], out, 0),
        jnp.where(is_written[:, None], log_sum, _NOTHING_SEEN),
        pools,
    )


def _shape(q: Float[Array, "T N H"], pools: Pools, paging: Paging) -> Shape:
    _, _, kv_heads, page_size, head_dim = pools[0].shape
    bytes_ = (pools[0].dtype.itemsize, q.dtype.itemsize)
    return Shape(q.shape[1], kv_heads, head_dim, page_size, paging.block_tables.shape[1], *bytes_)


def _to_tiles(q: Float[Array, "T N H"], shape: Shape, plan: Plan) -> Float[Array, "X K R H"]:
    """Query row r of a tile is head `r % group` of token `r // group`."""
    padded = jnp.pad(q, ((0, -q.shape[0] % plan.tokens_per_tile), (0, 0), (0, 0)))
    tiles = padded.reshape(-1, plan.tokens_per_tile, shape.kv_heads, shape.group, shape.head_dim)
    return tiles.transpose(0, 2, 1, 3, 4).reshape(tiles.shape[0], shape.kv_heads, -1, shape.head_dim)


def _from_tiles(tiles: Float[Array, "X K R D"], shape: Shape, plan: Plan) -> Float[Array, "T2 N D"]:
    split = tiles.reshape(tiles.shape[0], shape.kv_heads, plan.tokens_per_tile, shape.group, -1)
    return split.transpose(0, 2, 1, 3, 4).reshape(-1, shape.num_heads, tiles.shape[3])


def _lines(block_tables: Int[Array, "B M"]) -> Int[Array, "B W 1 128"]:
    """Page tables in lines that can be copied one by one."""
    rows, width = block_tables.shape
    padded = jnp.pad(block_tables.astype(jnp.int32), ((0, 0), (0, -width % IDS_PER_LINE)))
    return padded.reshape(rows, -1, 1, IDS_PER_LINE)
