"""Joins the results of parts of a row in one launch, which reads the parts that exist and no others.

XLA does the same in four launches, and reads as many parts of every row as the longest row may have (`join`).

Letters: B rows, U parts, K KV heads, G query heads of a KV head, N = K * G, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.paged_attention.gpu.splits import SLOT, Parts, Slots
from jaxserve_kernels.paged_attention.gpu.tiles import LEAST, LOG2E, MASKED, whole

_THREADS = 128
_MOST_AT_ONCE = 8
"""Parts whose numbers are asked for before the first of them is used: a part is read in about a microsecond."""
_AT_ONCE = 4
"""Parts of a tile of a segment that are read together."""
_PROGRAMS_OF_TILES = 1024
"""Most programs of a join of tiles, of which there may be none."""
_MOST_HEADS = 4
"""Heads of a program, unless more are needed to give each thread a number."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compile-time parameters of one launch."""

    num_rows: int
    num_heads: int
    group: int
    dim: int
    together: int
    """Heads whose numbers are a multiple of the threads."""
    heads: int
    """Heads of a program: a multiple of `together`."""
    at_once: int
    """Parts that are read together."""
    num_programs: int
    is_counted: bool
    """True if only the first rows exist; the device knows how many."""
    has_sinks: bool

    @property
    def width(self) -> int:
        return self.together * self.dim

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.width,), vec_size=1)


class _Refs(NamedTuple):
    """Operands and results in device memory."""

    values: Any
    stats: Any
    first_parts: Any
    parts_of_row: Any
    sinks: Any
    """None without sinks."""
    slots: _SlotRefs | None
    """None if all rows exist."""
    out: Any


class _SlotRefs(NamedTuple):
    """Operands of a join of tiles of segments."""

    num_tiles: Any
    used_rows: Any
    of_tiles: Any
    in_parts: Any


def has_kernel(num_heads: int, dim: int) -> bool:
    """Return whether the heads of a row are whole programs."""
    return num_heads % _together(dim) == 0


def _together(dim: int) -> int:
    return next(count for count in range(1, _THREADS + 1) if count * dim % _THREADS == 0)


def join(
    parts: Parts,
    values: Float[Array, "U K G H"],
    stats: Float[Array, "U K 2 G8"],
    sinks: Float[Array, "N"] | None,
    dtype: jnp.dtype,
    *,
    typical_parts: int,
) -> Float[Array, "B N H"]:
    """Return the results of rows; zeros for a row without parts.

    stats: maxima and sums, of as many queries or more: they are read in place. typical_parts: of most rows; any row may have more.
    """
    num_parts, num_kv_heads, group, dim = values.shape
    at_once = min(_MOST_AT_ONCE, 2 * typical_parts)  # twice as many: a longer row has more
    kernel = _kernel(num_kv_heads, group, dim, at_once, parts, is_counted=False, has_sinks=sinks is not None)
    return _launch(kernel, parts, values.reshape(num_parts, -1), stats, (), sinks, dtype)


def join_slots(
    parts: Parts,
    slots: Slots,
    values: Float[Array, "K X H"],
    stats: Float[Array, "U K 2 G8"],
    sinks: Float[Array, "KG"] | None,
    dtype: jnp.dtype,
    num_tiles: Int[Array, ""],
    used_rows: Int[Array, "B"],
    *,
    rows_of_tile: int,
) -> Float[Array, "B KG H"]:
    """Return the results of the first `num_tiles` tiles of segments, G rows for each KV head.

    Rows after `used_rows` stay unwritten, but for those that are computed together with one before. values: rows of slots.
    sinks: one for each row. stats: maxima and sums, of `rows_of_tile` rows or more: they are read in place.
    """
    num_kv_heads, _, dim = values.shape
    kernel = _kernel(num_kv_heads, rows_of_tile, dim, _AT_ONCE, parts, is_counted=True, has_sinks=sinks is not None)
    of_tiles = whole(num_tiles.reshape(1), used_rows, slots.of_tiles, slots.in_parts)
    return _launch(kernel, parts, values.reshape(num_kv_heads, -1), stats, of_tiles, sinks, dtype)


def _kernel(
    num_kv_heads: int, group: int, dim: int, at_once: int, parts: Parts, *, is_counted: bool, has_sinks: bool
) -> _Kernel:
    together, num_heads, num_rows = _together(dim), num_kv_heads * group, parts.first_parts.shape[0]
    blocks = max(1, min(_MOST_HEADS, num_heads) // together)
    heads = together * next(count for count in range(blocks, 0, -1) if num_heads % (together * count) == 0)
    num_programs = num_rows * (num_heads // heads)
    if is_counted:
        num_programs = min(num_programs, _PROGRAMS_OF_TILES)
    return _Kernel(num_rows, num_heads, group, dim, together, heads, at_once, num_programs, is_counted, has_sinks)


def _launch(
    kernel: _Kernel,
    parts: Parts,
    values: Float[Array, "A X"],
    stats: Float[Array, "U K 2 G8"],
    of_tiles: Sequence[Array],
    sinks: Float[Array, "N"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "B N H"]:
    launch = plgpu.kernel(
        lambda *refs: _body(kernel, _named(kernel, *refs)),
        out_type=jax.ShapeDtypeStruct((kernel.num_rows, kernel.num_heads * kernel.dim), dtype),
        grid=(kernel.num_programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=mgpu.LoweringSemantics.Lane,
        ),
    )
    given = () if sinks is None else (sinks.astype(jnp.float32),)
    joined = launch(values, stats, parts.first_parts, parts.parts_of_row, *given, *of_tiles)
    return joined.reshape(kernel.num_rows, kernel.num_heads, kernel.dim)


def _named(kernel: _Kernel, *refs: Any) -> _Refs:
    *operands, out = refs
    slots = _SlotRefs(*operands[-4:]) if kernel.is_counted else None
    return _Refs(*operands[:4], operands[4] if kernel.has_sinks else None, slots, out)


def _body(kernel: _Kernel, refs: _Refs) -> None:
    program = jax.lax.axis_index("program")
    slots = refs.slots
    if slots is None:
        _join(kernel, refs, program)
        return
    num_units = slots.num_tiles[0] * (kernel.num_heads // kernel.heads)
    rounds = jax.lax.div(num_units - program + (kernel.num_programs - 1), jnp.int32(kernel.num_programs))

    def one(turn: Any, carry: None) -> None:
        index = turn * kernel.num_programs + program
        row, first_head = _place(kernel, index)

        @pl.when(jax.lax.rem(first_head, jnp.int32(kernel.group)) < slots.used_rows[row])
        def _() -> None:
            _join(kernel, refs, index)

    jax.lax.fori_loop(0, rounds, one, None)


def _place(kernel: _Kernel, index: Any) -> tuple[Any, Any]:
    """Return the row and the first of the heads of a unit of work."""
    blocks_of_row = jnp.int32(kernel.num_heads // kernel.heads)
    return jax.lax.div(index, blocks_of_row), jax.lax.rem(index, blocks_of_row) * kernel.heads


def _join(kernel: _Kernel, refs: _Refs, index: Any) -> None:
    """Join the parts of some heads of one row."""
    row, first_head = _place(kernel, index)
    count = refs.parts_of_row[row]
    blocks = range(0, kernel.heads, kernel.together)

    def several(turn: Any, carry: tuple[tuple[Array, Array, Array], ...]) -> tuple[tuple[Array, Array, Array], ...]:
        places = [turn * kernel.at_once + i for i in range(kernel.at_once)]
        found = []
        for block, before in zip(blocks, carry, strict=True):
            head = first_head + block
            known = [_part(kernel, refs, row, jnp.minimum(place, count - 1), head) for place in places]
            # A part that is not there is the last one again, and counts nothing.
            shown = [
                (values, jnp.where(place < count, maximum, MASKED), jnp.where(place < count, total, 0.0))
                for place, (values, maximum, total) in zip(places, known, strict=True)
            ]
            found.append(_merged(before, shown))
        return tuple(found)

    start = tuple((_full(kernel, 0.0), _full(kernel, MASKED), _full(kernel, 0.0)) for _ in blocks)
    turns = jax.lax.div(count + (kernel.at_once - 1), jnp.int32(kernel.at_once))
    joined = jax.lax.fori_loop(0, turns, several, start)
    for block, (values, maximum, total) in zip(blocks, joined, strict=True):
        head = first_head + block
        if kernel.has_sinks:
            sink = _of_heads(kernel, [refs.sinks[head + i] for i in range(kernel.together)])
            total = total + jnp.exp2(sink * LOG2E - maximum)
        result = values / jnp.maximum(total, LEAST)
        place = pl.ds(pl.multiple_of(head * kernel.dim, kernel.width), kernel.width)
        refs.out[row, place] = result.astype(refs.out.dtype)


def _part(kernel: _Kernel, refs: _Refs, row: Any, place: Any, head: Any) -> tuple[Array, Array, Array]:
    """Return the weighted values of a part of a row for `together` heads, their maxima, and their sums."""
    part = refs.first_parts[row] + place
    line, first = part, head
    if refs.slots is not None:
        line, first = jax.lax.div(head, jnp.int32(kernel.group)), jax.lax.rem(head, jnp.int32(kernel.group))
        first += (refs.slots.of_tiles[row] + place * refs.slots.in_parts[row]) * SLOT
    numbers = pl.ds(pl.multiple_of(first * kernel.dim, kernel.width), kernel.width)
    values = plgpu.load(refs.values.at[line, numbers], layout=kernel.layout)
    heads = [head + i for i in range(kernel.together)]
    group = jnp.int32(kernel.group)
    maxima, totals = (
        [refs.stats[part, jax.lax.div(each, group), which, jax.lax.rem(each, group)] for each in heads]
        for which in range(2)
    )
    return values, _of_heads(kernel, maxima), _of_heads(kernel, totals)


def _merged(before: tuple[Array, Array, Array], parts: list[tuple[Array, Array, Array]]) -> tuple[Array, Array, Array]:
    values, maximum, total = before
    highest = maximum
    for _, of_part, _ in parts:
        highest = jnp.maximum(highest, of_part)
    decay = jnp.exp2(maximum - highest)
    values, total = values * decay, total * decay
    for of_part, largest, weight in parts:
        factor = jnp.exp2(largest - highest)
        values, total = values + of_part * factor, total + weight * factor
    return values, highest, total


def _full(kernel: _Kernel, value: Any) -> Array:
    return plgpu.layout_cast(jnp.full((kernel.width,), value, jnp.float32), kernel.layout)


def _of_heads(kernel: _Kernel, numbers: list[Any]) -> Array:
    """Return the number of each head, as wide as its values."""
    found = _full(kernel, numbers[0])
    place = plgpu.broadcasted_iota(jnp.int32, (kernel.width,), 0, layout=kernel.layout)
    for i, number in enumerate(numbers[1:], 1):
        found = jnp.where(place >= i * kernel.dim, _full(kernel, number), found)
    return found
