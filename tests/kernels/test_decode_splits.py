"""The parts that rows of a decode step are cut into: complete, bounded, balanced, and each row's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention.gpu.splits import Cutting, Parts, make_cutting
from jaxserve_kernels.paged_attention.tuning import decode_tuning

TUNING = decode_tuning("h200", 128, 2)
KV_HEADS, WORKERS, LONGEST = 8, 264, 131072
"""Llama-3.1-8B with default settings on an H200."""


def cutting(num_rows: int) -> Cutting:
    return make_cutting(TUNING, num_rows, KV_HEADS, WORKERS, LONGEST)


def cut(lengths: np.ndarray) -> Parts:
    num_tiles = jnp.asarray(-(-lengths // TUNING.tile), jnp.int32)
    parts = jax.jit(cutting(len(lengths)).cut)(jnp.zeros_like(num_tiles), num_tiles)
    return Parts(*map(np.asarray, parts))


def busiest(parts: Parts) -> int:
    """Tiles of the worker that has most, when the workers take units in turns."""
    units = np.repeat(np.asarray(parts.counts[: int(parts.num_parts[0])]), KV_HEADS)
    return max(int(units[worker::WORKERS].sum()) for worker in range(WORKERS))


@pytest.mark.parametrize("num_rows", [2, 8, 32, 256])
def test_parts_of_a_row_are_side_by_side_and_cover_it_once(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    lengths = np.where(random.random(num_rows) < 0.2, 0, random.integers(1, 9000, num_rows))
    lengths[0] = LONGEST
    parts = cut(lengths)
    for row, length in enumerate(lengths):
        start, count = int(parts.first_parts[row]), int(parts.parts_of_row[row])
        mine = slice(start, start + count)
        assert (parts.rows[mine] == row).all() and (parts.counts[mine] > 0).all()
        ends = parts.first_tiles[mine] + parts.counts[mine]
        assert list(parts.first_tiles[mine]) == [0, *ends[:-1]][:count]
        assert (ends[-1] if count else 0) == -(-length // TUNING.tile)
    assert int(parts.num_parts[0]) == parts.parts_of_row.sum() <= cutting(num_rows).num_parts
    assert not parts.counts[int(parts.num_parts[0]) :].any()


@pytest.mark.parametrize(("num_rows", "most"), [(2, 33), (8, 32), (32, 32), (64, 32), (128, 16), (256, 8)])
def test_default_context_of_131072_tokens_has_few_parts(num_rows: int, most: int) -> None:
    """They are joined in a straight line, in each of 32 layers."""
    found = cutting(num_rows)
    assert found.most_parts <= most
    assert found.num_parts <= max(2 * num_rows, 2 * WORKERS // KV_HEADS) + TUNING.long_parts


@pytest.mark.parametrize(("num_rows", "length"), [(1, 1024), (2, 32768), (8, 8192), (32, 4096), (256, 2048)])
def test_rows_alike_fill_the_device(num_rows: int, length: int) -> None:
    parts = cut(np.full(num_rows, length))
    whole = num_rows * KV_HEADS * -(-length // TUNING.tile)
    least_split = TUNING.min_split // TUNING.tile
    assert busiest(parts) <= max(1.4 * whole / WORKERS, least_split)


@pytest.mark.parametrize(
    ("num_rows", "longest", "most"),
    [(2, 32768, 1.3), (8, 32768, 1.3), (32, 32768, 1.3), (32, LONGEST, 1.3), (64, LONGEST, 1.3), (256, LONGEST, 2.0)],
)
def test_one_long_row_among_short_ones_keeps_few_workers_waiting(num_rows: int, longest: int, most: float) -> None:
    lengths = np.full(num_rows, 1024)
    lengths[num_rows // 2] = longest
    whole = KV_HEADS * int((lengths // TUNING.tile).sum())
    assert busiest(cut(lengths)) <= most * whole / WORKERS


def test_parts_of_a_row_do_not_depend_on_its_neighbours() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 8000, 32)
    mixed = lengths.copy()
    mixed[1:] = random.permutation(random.integers(1, 2000, 31))
    one, other = cut(lengths), cut(mixed)
    assert one.parts_of_row[0] == other.parts_of_row[0]
    sizes = [found.counts[found.first_parts[0]] for found in (one, other)]
    assert sizes[0] == sizes[1]


def test_more_long_rows_than_there_is_room_for_get_fewer_parts() -> None:
    parts = cut(np.full(256, LONGEST))
    assert int(parts.num_parts[0]) <= cutting(256).num_parts
    assert parts.parts_of_row.min() >= 1
