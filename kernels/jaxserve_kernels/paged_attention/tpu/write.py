"""Writing the keys and values of chunks into their pages: whole pages, assembled in VMEM.

Parts of a packed tile cannot be written, so a page is read, the chunk's tokens are put over it, and it goes back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int, Num

from jaxserve_kernels.paged_attention.tpu.units import Scalar, spread

Pools = tuple[Num[Array, "L P K S H"], Num[Array, "L P K S H"]]


class PageWrites(NamedTuple):
    """U pages that get tokens; `num_writes` of them are real, and all of those differ."""

    num_writes: Int[Array, "1"]
    pages: Int[Array, "U"]
    first_tokens: Int[Array, "U"]
    """Token on the flat axis that slot 0 would hold; may be negative."""
    first_slots: Int[Array, "U"]
    end_slots: Int[Array, "U"]


class _Scalars(NamedTuple):
    layer: Any
    writes: PageWrites


def page_writes(
    is_chunk: Bool[Array, "B"],
    kv_lengths: Int[Array, "B"],
    query_starts: Int[Array, "B1"],
    block_tables: Int[Array, "B M"],
    *,
    num_tokens: int,
    page_size: int,
) -> PageWrites:
    """The pages that the rows of chunks write to."""
    starts, ends = query_starts[:-1], query_starts[1:]
    offsets = kv_lengths - ends  # token + offset = position
    first_pages = (starts + offsets) // page_size
    pages_of_row = jnp.where(is_chunk, -(-kv_lengths // page_size) - first_pages, 0)
    # A chunk of n tokens touches at most n // page_size + 2 pages.
    most = num_tokens // page_size + 2 * min(is_chunk.shape[0], num_tokens)
    count, rows, within = spread(pages_of_row, most)
    columns = jnp.clip(first_pages[rows] + within, 0, block_tables.shape[1] - 1)
    positions = columns * page_size  # of slot 0
    return PageWrites(
        count,
        block_tables[rows, columns].astype(jnp.int32),
        (positions - offsets[rows]).astype(jnp.int32),
        jnp.maximum(starts[rows] + offsets[rows] - positions, 0).astype(jnp.int32),
        jnp.minimum(kv_lengths[rows] - positions, page_size).astype(jnp.int32),
    )


def write_pages(
    new: tuple[Num[Array, "K T H"], Num[Array, "K T H"]],
    pools: Pools,
    layer: Int[Array, ""],
    writes: PageWrites,
    *,
    head_splits: int,
    vmem_limit_bytes: int,
) -> Pools:
    """Put tokens of the flat axis into their pages; returns the pools in their own buffers. See `plan.WritePlan`."""
    page_size, dim = pools[0].shape[3:]
    heads = pools[0].shape[2] // head_splits
    num_blocks = -(-new[0].shape[1] // page_size)
    padded = tuple(jnp.pad(_in_tiles(x), ((0, 0), (0, -x.shape[1] % page_size), (0, 0))) for x in new)
    scalars = _Scalars(layer.astype(jnp.int32).reshape(1), writes)

    def of_tokens(following: int) -> pl.BlockSpec:
        """Return the block of the flat axis that holds a page's first token, or the next one."""

        def place(split: Scalar, item: Scalar, scalars: _Scalars) -> tuple[Scalar, ...]:
            block = scalars.writes.first_tokens[item] // page_size + following
            return split, jnp.clip(block, 0, num_blocks - 1), jnp.int32(0)

        return pl.BlockSpec((heads, page_size, dim), place)

    def of_page(split: Scalar, item: Scalar, scalars: _Scalars) -> tuple[Scalar, ...]:
        return scalars.layer[0], scalars.writes.pages[item], split, jnp.int32(0), jnp.int32(0)

    page = pl.BlockSpec((None, None, heads, page_size, dim), of_page)
    num_scalars = len(jax.tree.leaves(scalars))
    written: Pools = pl.pallas_call(
        _kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(head_splits, writes.num_writes[0]),
            in_specs=((of_tokens(0), of_tokens(0)), (of_tokens(1), of_tokens(1)), (page, page)),
            out_specs=(page, page),
        ),
        input_output_aliases={num_scalars + 4: 0, num_scalars + 5: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        name="paged_write",
    )(scalars, padded, padded, pools)
    return written


def _in_tiles(new: Num[Array, "K T H"]) -> Num[Array, "K T H"]:
    """Tokens of 8 bits as bfloat16, which holds them all: 16 slots are half a tile of theirs, and no block for a copy."""
    return new.astype(jnp.bfloat16) if new.dtype.itemsize == 1 else new


def _kernel(
    scalars: _Scalars,
    before: tuple[Any, Any],
    after: tuple[Any, Any],
    old_pages: tuple[Any, Any],
    *pages: Any,
) -> None:
    writes, item = scalars.writes, pl.program_id(1)
    page_size = pages[0].shape[1]
    slots = jax.lax.broadcasted_iota(jnp.int32, pages[0].shape, 1)
    is_new = (slots >= writes.first_slots[item]) & (slots < writes.end_slots[item])
    shift = writes.first_tokens[item] % page_size
    for first, second, old, page in zip(before, after, old_pages, pages, strict=True):
        tokens = jnp.concatenate([first[...].astype(jnp.float32), second[...].astype(jnp.float32)], 1)
        tokens = pltpu.roll(tokens, (2 * page_size - shift) % (2 * page_size), 1)[
            :, :page_size
        ]  # slot 0's to the front
        page[...] = jnp.where(is_new, tokens, old[...].astype(jnp.float32)).astype(page.dtype)
