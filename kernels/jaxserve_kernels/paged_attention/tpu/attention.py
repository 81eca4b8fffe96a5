"""The attention kernel for TPUs: online softmax over a unit's blocks of pages, for one tile of queries after another.

In a decode step the row's new key and value are put into their page on the way: the page is in VMEM anyway, takes
part in attention from there, and the tile of slots that holds them is copied back, since parts of a packed tile cannot
be written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Num

from jaxserve_kernels.paged_attention.tpu.plan import LANES, Plan, compute_dtype, heads_at_once, slots_per_tile
from jaxserve_kernels.paged_attention.tpu.stream import IDS_PER_LINE, Pool, Stream
from jaxserve_kernels.paged_attention.tpu.units import Scalar, Units

_LOWEST = -1e30
"""Start of a running maximum: finite, and above a masked key's score, so that its weight is exactly zero."""
_LEAST_SUM = 1e-30

Pools = tuple[Num[Array, "L P K S H"], Num[Array, "L P K S H"]]


class NewTokens(NamedTuple):
    """The writes of a decode step: each row's key and value (a float32 copy of values of the pool's type), and its page."""

    k: Float[Array, "B K 1 H"]
    v: Float[Array, "B K 1 H"]
    pages: Int[Array, "B"]


@dataclass(frozen=True, slots=True)
class Mask:
    """The window and the softcap of all queries."""

    sliding_window: int | None
    softcap: float | None


class _Scratch(NamedTuple):
    maximum: Any  # [K, R, 128], all lanes alike
    total: Any
    values: Any  # [K, R, H]
    num_blocks: Any  # SMEM [1]: worked on so far
    lines: Any
    buffers: tuple[Any, Any]
    line_arrived: Any
    pages_arrived: Any
    written_slots: tuple[Any, Any]  # [K, tile of slots, H] each
    written: Any


class _Scalars(NamedTuple):
    layer: Any
    units: Units
    new_pages: Any


def attend(
    q: Float[Array, "X K R H"],
    pools: Pools,
    layer: Int[Array, ""],
    tables: Int[Array, "B W 1 128"],
    units: Units,
    new: NewTokens | None,
    mask: Mask,
    plan: Plan,
    *,
    vmem_limit_bytes: int,
    cost: pl.CostEstimate,
) -> tuple[Float[Array, "X K R H"], Float[Array, "X K 1 R"], Pools]:
    """Attend tile by tile; query row r of a tile belongs to its token `r // plan.rows_per_token`.

    Returns the logarithms of the softmax's sums as well, and the pools in their own buffers. Tiles without units
    come back undefined.
    """
    tiles, heads, rows, dim = q.shape
    local = heads // plan.head_splits
    scalars = _Scalars(layer.astype(jnp.int32).reshape(1), units, None if new is None else new.pages)

    def of_tile(*shape: int) -> pl.BlockSpec:
        def place(split: Scalar, unit: Scalar, scalars: _Scalars) -> tuple[Scalar, ...]:
            return scalars.units.tiles[unit], split, jnp.int32(0), jnp.int32(0)

        return pl.BlockSpec((None, local, *shape), place)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    writes = None if new is None else (new.k, new.v)
    num_before = len(jax.tree.leaves((scalars, tables, q, writes)))
    attended: tuple[Array, Array, Pools] = pl.pallas_call(
        functools.partial(_kernel, mask, plan),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((tiles, heads, 1, rows), jnp.float32),
            tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(plan.head_splits, units.num_units[0]),
            in_specs=(
                anywhere,
                of_tile(rows, dim),
                None if new is None else (of_tile(1, dim), of_tile(1, dim)),
                (anywhere, anywhere),
            ),
            out_specs=(of_tile(rows, dim), of_tile(1, rows), (anywhere, anywhere)),
            scratch_shapes=[_scratch((local, rows, dim), pools[0], plan)],
        ),
        input_output_aliases={num_before: 2, num_before + 1: 3},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        cost_estimate=cost,
        name="paged_chunks" if new is None else "paged_decode",
    )(scalars, tables, q, writes, pools)
    return attended


def _scratch(tile: tuple[int, int, int], pool: Num[Array, "L P K S H"], plan: Plan) -> _Scratch:
    heads, rows, _ = tile
    page = (heads, *pool.shape[3:])
    buffer = pltpu.VMEM((2, plan.pages_per_block, *page), pool.dtype)
    return _Scratch(
        maximum=pltpu.VMEM((heads, rows, LANES), jnp.float32),
        total=pltpu.VMEM((heads, rows, LANES), jnp.float32),
        values=pltpu.VMEM(tile, jnp.float32),
        num_blocks=pltpu.SMEM((1,), jnp.int32),
        lines=pltpu.SMEM((2, 1, IDS_PER_LINE), jnp.int32),
        buffers=(buffer, buffer),
        line_arrived=pltpu.SemaphoreType.DMA((2,)),
        pages_arrived=pltpu.SemaphoreType.DMA((2,)),
        written_slots=(pltpu.VMEM((heads, slots_per_tile(pool.dtype, page[1]), page[2]), pool.dtype),) * 2,
        written=pltpu.SemaphoreType.DMA(()),
    )


def _kernel(
    mask: Mask,
    plan: Plan,
    scalars: _Scalars,
    tables: Any,
    q: Any,
    new: tuple[Any, Any] | None,
    inputs: tuple[Any, Any],  # the pools, as they come out
    out: Any,
    log_sum: Any,
    pools: tuple[Any, Any],
    scratch: _Scratch,
) -> None:
    split, unit = pl.program_id(0), pl.program_id(1)
    units, heads = scalars.units, q.shape[0]
    pool = Pool(pools, scalars.layer[0], split * heads, heads)
    stream = Stream(units, tables, pool, scratch.lines, scratch.buffers, scratch.line_arrived, scratch.pages_arrived)

    @pl.when(unit == 0)
    def _() -> None:
        scratch.num_blocks[0] = 0
        stream.begin()

    tile, last_unit = units.tiles[unit], units.num_units[0] - 1
    first_block, end_block = stream.blocks_of(unit)

    @pl.when((unit == 0) | (units.tiles[jnp.maximum(unit - 1, 0)] != tile))
    def _() -> None:
        scratch.maximum[...] = jnp.full(scratch.maximum.shape, _LOWEST, jnp.float32)
        scratch.total[...] = jnp.zeros(scratch.total.shape, jnp.float32)
        scratch.values[...] = jnp.zeros(scratch.values.shape, jnp.float32)

    @pl.loop(first_block, end_block)
    def _(block: Scalar) -> None:
        slot = scratch.num_blocks[0] % 2
        scratch.num_blocks[0] += 1
        stream.receive(unit, block, slot)

        @pl.when(block == end_block - 1)
        def _() -> None:
            page, place = stream.pages_of(unit, block)[1] - 1, (units.end_keys[unit] - 1) % stream.page_size
            if new is not None:
                _insert(scratch, new, pool.page(scalars.new_pages[units.rows[unit]]), slot, page, place, unit > 0)
            # A masked key weighs exactly zero, which would make NaN of NaN.
            _clear(scratch.buffers[1].at[slot, page], lambda slots: slots > place)

        if mask.sliding_window is not None:

            @pl.when(block == first_block)
            def _() -> None:
                page, place = stream.pages_of(unit, block)[0], units.first_keys[unit] % stream.page_size
                _clear(scratch.buffers[1].at[slot, page], lambda slots: slots < place)

        keys_per_block = stream.pages_per_block * stream.page_size
        first_key = block * keys_per_block
        visible = _visible(
            mask.sliding_window, plan.rows_per_token, units, unit, first_key, (q.shape[1], keys_per_block)
        )
        k_block, v_block = (buffer.at[slot] for buffer in scratch.buffers)
        _fold(q, k_block, v_block, visible, mask.softcap, scratch)

    @pl.when((unit == last_unit) | (units.tiles[jnp.minimum(unit + 1, last_unit)] != tile))
    def _() -> None:
        total = jnp.maximum(scratch.total[...], _LEAST_SUM)
        out[...] = (scratch.values[...] / total[..., :1]).astype(out.dtype)
        log_sum[...] = jnp.swapaxes(scratch.maximum[...] + jnp.log(total), 1, 2)[:, :1]

    if new is not None:

        @pl.when(unit == last_unit)
        def _() -> None:
            _wait_for_slots(scratch, pool.page(jnp.int32(0)))


def _clear(page: Any, is_cleared: Callable[[Array], Array]) -> None:
    """Zeros in some slots of a page [K, S, H]."""
    slots = jax.lax.broadcasted_iota(jnp.int32, page.shape, 1)
    page[...] = jnp.where(is_cleared(slots), 0.0, page[...].astype(jnp.float32)).astype(page.dtype)


def _insert(
    scratch: _Scratch, new: tuple[Any, Any], pages: list[Any], slot: Scalar, page: Scalar, place: Scalar, is_busy: Any
) -> None:
    """Put a row's new key and value into their page of the buffers, and start the way of their slots' tile to the pool."""

    @pl.when(is_busy)
    def _() -> None:
        _wait_for_slots(scratch, pages)

    count = scratch.written_slots[0].shape[1]
    first = pl.multiple_of(place // count * count, count)
    for buffer, added, written in zip(scratch.buffers, new, scratch.written_slots, strict=True):
        own = buffer.at[slot, page, :, pl.ds(first, count)]
        is_new = jax.lax.broadcasted_iota(jnp.int32, written.shape, 1) == place - first
        written[...] = jnp.where(is_new, added[...], own[...].astype(jnp.float32)).astype(written.dtype)
        own[...] = written[...]
    for written, page_in_pool in zip(scratch.written_slots, pages, strict=True):
        pltpu.make_async_copy(written, page_in_pool.at[:, pl.ds(first, count)], scratch.written).start()


def _wait_for_slots(scratch: _Scratch, pages: list[Any]) -> None:
    """Any slots of any pages do: a wait counts bytes."""
    for written, page in zip(scratch.written_slots, pages, strict=True):
        pltpu.make_async_copy(written, page.at[:, pl.ds(0, written.shape[1])], scratch.written).wait()


def _fold(
    q: Any, k_block: Any, v_block: Any, visible: Bool[Array, "R X"], softcap: float | None, scratch: _Scratch
) -> None:
    """Take a block [C, K, S, H] of keys and values into the running softmax of every head."""
    heads, rows, dim = q.shape
    num_keys = visible.shape[1]
    dtype = compute_dtype(k_block.dtype)
    # Float32 is multiplied as float32, as in the reference.
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    matmul = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

    def fold(head: Scalar | int) -> None:
        keys, values = (block[:, head].astype(dtype).reshape(num_keys, dim) for block in (k_block, v_block))
        scores = matmul(q[head].astype(dtype), keys, (((1,), (1,)), ((), ())))  # (R, X)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible, scores, -jnp.inf)
        before = scratch.maximum[head]  # (R, 128)
        maximum = jnp.maximum(before, scores.max(1, keepdims=True))
        weights = jnp.exp(scores - maximum[:, :1])
        decay = jnp.exp(before - maximum)
        scratch.maximum[head] = maximum
        scratch.total[head] = scratch.total[head] * decay + weights.sum(1, keepdims=True)
        added = matmul(weights.astype(dtype), values, (((1,), (0,)), ((), ())))
        scratch.values[head] = scratch.values[head] * decay[:, :1] + added

    at_once = heads_at_once(heads, rows, num_keys)

    @pl.loop(0, heads // at_once)
    def _(turn: Scalar) -> None:
        for i in range(at_once):
            fold(turn * at_once + i)


def _visible(
    window: int | None,
    rows_per_token: int,
    units: Units,
    unit: Scalar,
    first_key: Scalar,
    shape: tuple[int, int],
) -> Bool[Array, "R X"]:
    """Return the keys of a block that each query row of the tile sees: causal, in the window, and of the unit's tokens.

    Row r is of token `r // n` of the tile; compared are multiples of n, as vectors cannot be divided.
    """
    n = rows_per_token
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    distance = (jax.lax.broadcasted_iota(jnp.int32, shape, 1) + (first_key - units.positions[unit])) * n
    visible = (distance <= row) & (row >= units.first_tokens[unit] * n) & (row < units.end_tokens[unit] * n)
    if window is not None:
        visible &= row < distance + window * n
    return visible
