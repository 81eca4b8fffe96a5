"""What the op asks of the TPU kernels: write a step's keys and values into their pages and attend."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxserve_kernels.paged_attention.layout import Paging
from jaxserve_kernels.paged_attention.tpu.attention import Mask, NewTokens, attend
from jaxserve_kernels.paged_attention.tpu.plan import (
    LANES,
    Chip,
    Plan,
    Shape,
    chunk_plan,
    decode_plan,
    round_up,
    this_chip,
)
from jaxserve_kernels.paged_attention.tpu.stream import IDS_PER_LINE
from jaxserve_kernels.paged_attention.tpu.units import chunk_units, decode_units
from jaxserve_kernels.paged_attention.tpu.write import page_writes, write_pages

Pools = tuple[Num[Array, "L P K S H2"], Num[Array, "L P K S H2"]]
Attended = tuple[Float[Array, "T N H"], Float[Array, "T N"], Pools]

_NOTHING_SEEN = -1e30
"""Logarithm of a sum without terms: finite, so that what is made of it is."""


def pool_head_dim(head_dim: int) -> int:
    """Last dimension of the pool: whole rows of lanes, which TPUs would lay out in any case. The padding is zero."""
    return round_up(head_dim, LANES)


def supports(query_dtype: jnp.dtype, pool_dtype: jnp.dtype, pool_shape: tuple[int, ...]) -> str | None:
    """Why the kernels do not serve a pool of this shape `[L, P, K, S, H]`, in a few words; None when they do."""
    page_size, head_dim = pool_shape[3:]
    served = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)
    if pool_dtype not in served:
        return f"TPUs keep no KV cache of {pool_dtype}"
    if query_dtype not in (jnp.float32, jnp.bfloat16):
        return f"TPUs compute nothing in {query_dtype}"
    if head_dim % LANES:
        return f"the pool's head dim ({head_dim}) is not a multiple of {LANES}"
    if page_size % 16:
        return f"the page size ({page_size}) is not a multiple of 16"
    return None


def write_and_attend(
    q: Float[Array, "T N H"],
    k: Num[Array, "T K H"],
    v: Num[Array, "T K H"],
    k_pages: Num[Array, "L P K S H2"],
    v_pages: Num[Array, "L P K S H2"],
    layer: Int[Array, ""],
    paging: Paging,
    *,
    sliding_window: int | None,
    softcap: float | None,
    chip: Chip | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"], Num[Array, "L P K S H2"], Num[Array, "L P K S H2"]]:
    """Write the tokens' keys and values, which have the pool's type, and attend with scores `q . k`.

    Returns attention, the logarithm of each softmax's sum, and the pools, under donation the same buffers.
    A token that sees nothing gets zeros and a very low logarithm. `chip`: None is the one compiled for.
    """
    chip = chip or this_chip()
    mask = Mask(sliding_window, softcap)
    pools = (k_pages, v_pages)
    if paging.ragged is None:
        is_decode = jnp.ones(paging.kv_lengths.shape, bool)
        out, log_sum, pools = _decode(q, k, v, pools, layer, paging, is_decode, mask, chip)
        return out, log_sum, *pools
    rows = paging.kv_lengths.shape[0]
    is_decode = jnp.arange(rows) < paging.ragged.num_decode_rows
    decoded, decoded_sum, pools = _decode(q[:rows], k[:rows], v[:rows], pools, layer, paging, is_decode, mask, chip)
    out, log_sum, pools = _chunks(q, k, v, pools, layer, paging, ~is_decode, mask, chip)
    out = out.at[:rows].set(jnp.where(is_decode[:, None, None], decoded, out[:rows]))
    log_sum = log_sum.at[:rows].set(jnp.where(is_decode[:, None], decoded_sum, log_sum[:rows]))
    return out, log_sum, *pools


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
    padding = ((0, 0), (0, 0), (0, plan.rows_per_token - shape.group), (0, shape.head_dim - dim))
    new_k, new_v = (_widened(x, shape).astype(jnp.float32)[:, :, None] for x in (k, v))
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
    out = jnp.where(is_written, attended[:, :, : shape.group, :dim].reshape(q.shape), 0)
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
    tokens, _, dim = q.shape
    is_chunk &= (paging.query_starts[1:] > paging.query_starts[:-1]) & (paging.kv_lengths > 0)
    rows = (is_chunk, paging.kv_lengths, paging.query_starts)
    writes = page_writes(*rows, paging.block_tables, num_tokens=tokens, page_size=shape.page_size)
    new_k, new_v = (_widened(x, shape).transpose(1, 0, 2) for x in (k, v))  # (K, T, H)
    plan = chunk_plan(shape, chip, tokens)
    pools = write_pages((new_k, new_v), pools, layer, writes, plan.head_splits)
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
    out = _from_tiles(attended, shape, plan)[:tokens, :, :dim]
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


def _widened(x: Num[Array, "T K H"], shape: Shape) -> Num[Array, "T K H2"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, shape.head_dim - x.shape[2])))


def _to_tiles(q: Float[Array, "T N H"], shape: Shape, plan: Plan) -> Float[Array, "X K R H2"]:
    """Query row r of a tile is head `r % group` of token `r // group`."""
    tokens, _, dim = q.shape
    missing = -tokens % plan.tokens_per_tile
    padded = jnp.pad(q, ((0, missing), (0, 0), (0, shape.head_dim - dim)))
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
