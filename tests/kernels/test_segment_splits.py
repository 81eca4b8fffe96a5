"""The parts that tiles of query segments are cut into: complete, each segment's own, and never more than there is room for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention.gpu.splits import (
    SLOT,
    Parts,
    SegmentCutting,
    Slots,
    make_segment_cutting,
    slot_bytes,
)

KEYS, LEAST, GROUP, QUERIES = 64, 8, 4, 8
KV_HEADS, WORKERS = 8, 256
"""Llama-3.1-8B in tiles of 32 columns; thread blocks of a GPU of 128 multiprocessors."""
ROOM = 256 << 20
SIZES = [(128, 128), (256, 256), (512, 256), (2048, 256), (8192, 256)]
"""Tokens and rows of mixed steps."""


def cutting(num_tokens: int, num_rows: int) -> SegmentCutting:
    num_tiles = num_tokens // QUERIES + num_rows
    most_slots = num_tokens * GROUP // SLOT + num_tiles
    return make_segment_cutting(num_tiles, num_rows, most_slots, slot_bytes(KV_HEADS, 128), LEAST)


def cut_slots(
    of: SegmentCutting, num_tiles: list[int], segments: list[int], used: list[int] | None = None
) -> tuple[Parts, Slots]:
    """num_tiles: tiles of keys of each tile of queries; segments: the segment of each, some number."""
    counts = [segments.count(each) for each in segments]
    arrays = [jnp.array(each, jnp.int32) for each in (num_tiles, counts, used or [32] * len(counts))]
    parts, slots = jax.jit(of.cut)(jnp.zeros(len(counts), jnp.int32), *arrays)
    return Parts(*map(np.asarray, parts)), Slots(*map(np.asarray, slots))


def cut(of: SegmentCutting, num_tiles: list[int], segments: list[int]) -> Parts:
    return cut_slots(of, num_tiles, segments)[0]


@pytest.mark.parametrize(("length", "units"), [(8192, 128), (32768, 256), (131072, 256)])
def test_a_short_suffix_after_a_long_prefix_takes_many_thread_blocks(length: int, units: int) -> None:
    """It took eight, one for each KV head."""
    found = cut(cutting(128, 128), [length // KEYS], [0])
    assert KV_HEADS * int(found.num_parts[0]) == units


def test_a_suffix_of_64_tokens_fills_the_device() -> None:
    found = cut(cutting(256, 64), [32768 // KEYS] * 8, [0] * 8)
    assert KV_HEADS * int(found.num_parts[0]) == WORKERS


def test_tiles_of_a_long_chunk_are_not_cut() -> None:
    found = cut(cutting(2048, 256), [512] * 250, [0] * 250)
    assert (found.parts_of_row == 1).all()


def test_no_part_is_shorter_than_its_results_are_worth() -> None:
    found = cut(cutting(128, 128), [LEAST, LEAST + 1, 3 * LEAST], [0, 1, 2])
    assert list(found.parts_of_row) == [1, 2, 3]


def test_parts_are_side_by_side_and_cover_every_tile_once() -> None:
    random = np.random.default_rng(0)
    segments = sorted(random.integers(0, 40, 100).tolist())
    num_tiles = np.where(random.random(100) < 0.1, 0, random.integers(1, 3000, 100))
    parts = cut(cutting(800, 128), num_tiles.tolist(), segments)
    for tile, count in enumerate(num_tiles):
        mine = slice(parts.first_parts[tile], parts.first_parts[tile] + parts.parts_of_row[tile])
        ends = parts.first_tiles[mine] + parts.counts[mine]
        assert (parts.rows[mine] == tile).all() and (parts.counts[mine] > 0).all()
        assert list(parts.first_tiles[mine]) == [0, *ends[:-1]][: len(ends)]
        assert (ends[-1] if count else 0) == count


@pytest.mark.parametrize("tokens_of_row", [1, 2, 9, 100])
@pytest.mark.parametrize(("num_tokens", "num_rows"), SIZES)
def test_the_worst_step_has_room(num_tokens: int, num_rows: int, tokens_of_row: int) -> None:
    """There are as many segments with long prefixes as there can be; their results do not overlap."""
    of, num_segments = cutting(num_tokens, num_rows), min(num_rows, num_tokens // tokens_of_row)
    sizes = [min(QUERIES, tokens_of_row - first) for first in range(0, tokens_of_row, QUERIES)] * num_segments
    segments = [i * num_segments // len(sizes) for i in range(len(sizes))]
    parts, slots = cut_slots(of, [4096] * len(sizes), segments, [GROUP * size for size in sizes])
    num_parts = int(parts.num_parts[0])
    assert num_parts <= of.num_parts
    ends = slots.of_parts[:num_parts] + slots.in_parts[parts.rows[:num_parts]]
    assert ends.max() <= of.num_slots
    assert of.num_slots * slot_bytes(KV_HEADS, 128) <= ROOM
    order = np.argsort(slots.of_parts[:num_parts])
    assert (ends[order][:-1] <= slots.of_parts[order][1:]).all()


def test_parts_of_a_segment_do_not_depend_on_its_neighbours() -> None:
    of, mine = cutting(256, 256), [700, 701]
    alone = cut(of, [*mine, *[0] * 200], [0, 0, *range(1, 201)])
    beside = cut(of, [*mine, *[4096] * 200], [0, 0, *range(1, 201)])
    for tile in range(2):
        sizes = [found.counts[found.first_parts[tile] :][: found.parts_of_row[tile]] for found in (alone, beside)]
        np.testing.assert_array_equal(*sizes)
