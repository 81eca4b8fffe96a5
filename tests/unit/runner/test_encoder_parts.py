"""The parts of an encoder call, and the memory between them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from jaxserve.config import ImagesConfig
from jaxserve.model_config.vision import Normalization, VisionConfig
from jaxserve.runner.images.encoder import image_shape, image_step_tokens
from jaxserve.runner.images.parts import (
    MIN_TILE,
    MOST_TILES,
    EncoderTiles,
    Unit,
    divide,
    part_ends,
    unit_work,
    units_of,
    whole_units_of,
)

SMOLVLM = VisionConfig(  # SmolVLM-256M's
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    patch_size=16,
    norm_eps=1e-6,
    activation="gelu_tanh",
    positions="table",
    positions_per_side=32,
    connector="linear",
    connector_eps=1e-6,
    merge=4,
    output_size=576,
    normalization=Normalization(1 / 255, (0.5,) * 3, (0.5,) * 3),
    image_token_id=3,
    image_patches=1024,
)
DECODER_WEIGHTS = 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
"""Multiplications of a token in the layers of SmolVLM-256M's decoder."""


START, HEADS, TILE, END = 1024 * 768 * 768, 3 * 768**2, 768**2 + 2 * 768 * 3072 + 2 * 1024 * 768, 64 * 16 * 768 * 576
"""Multiplications: of the first program, of a patch in both programs of a layer, and of the last one, by hand."""
WORK = 20 * DECODER_WEIGHTS


def ends_of(tower: VisionConfig, num_patches: int, work: int) -> tuple[EncoderTiles, dict[int, tuple[int, ...]]]:
    """Return the tiles of calls of `num_patches` patches, and the ends of their parts."""
    tiles = divide(tower, (num_patches,), work)
    assert tiles is not None
    return tiles, dict(part_ends(tower, tiles, (num_patches,), work))


def test_parts_of_a_call_by_hand() -> None:
    assert WORK == 2_123_366_400 and 512 * TILE > WORK > 256 * TILE
    tiles, ends = ends_of(SMOLVLM, 1024, WORK)
    assert tiles.sizes == (256,)
    assert START + 3 * 256 * HEADS <= WORK < START + 4 * 256 * HEADS
    # The first program with three tiles' heads, the fourth, then tiles of a layer one by one; later 4 times heads at once.
    assert ends[1024][:7] == (4, 5, 6, 7, 8, 9, 13)
    assert 4 * 256 * HEADS <= WORK < 4 * 256 * HEADS + 256 * TILE
    assert ends[1024][-1] == 1 + 12 * 8 + 1 and len(ends[1024]) == 1 + 12 * 5 + 1
    assert END + 256 * TILE > WORK > END


def test_a_part_on_a_cpu_is_at_most_ten_tokens_of_the_decoder() -> None:
    """With AVX2 twenty take longer than a decode step: docs/benchmarks/images.md."""
    tiles, ends = ends_of(SMOLVLM, 1024, image_step_tokens("cpu", ImagesConfig()) * DECODER_WEIGHTS)
    works = [unit_work(SMOLVLM, unit, 128, 1024) for unit in units_of(tiles, 128, 1024)]
    parts = [sum(works[start:end]) for start, end in itertools.pairwise((0, *ends[1024]))]
    assert tiles.sizes == (128,) and len(parts) == 122
    assert 9 * DECODER_WEIGHTS < max(parts) <= 10 * DECODER_WEIGHTS


def test_a_call_of_fewer_patches_has_no_tiles_without_a_patch() -> None:
    _, ends = ends_of(replace(SMOLVLM, image_patches=None), 1024, WORK)
    assert {size: each[-1] for size, each in ends.items()} == {
        256 * count: 1 + 12 * 2 * count + 1 for count in range(1, 5)
    }


@pytest.mark.parametrize("step_work", [1, 10**9, 10**10, 10**11, 10**12])
@pytest.mark.parametrize("num_patches", [676, 1024, 2520, 4096])
def test_no_part_has_more_work_than_it_may_unless_it_is_one_call_of_a_program(num_patches: int, step_work: int) -> None:
    vision = replace(SMOLVLM, image_patches=None, merge=2, connector="mlp", deepstack_layers=(5, 1))
    tiles = divide(vision, (num_patches,), step_work)
    if tiles is None:
        assert step_work >= 10**11
        return
    (size,) = tiles.sizes
    assert size % vision.block == 0 and size >= max(MIN_TILE // 2, num_patches // MOST_TILES)
    for count, ends in part_ends(vision, tiles, (num_patches,), step_work):
        units = units_of(tiles, size, count)
        works = [unit_work(vision, unit, size, num_patches) for unit in units]
        parts = [works[start:end] for start, end in itertools.pairwise((0, *ends))]
        assert [work for part in parts for work in part] == works
        assert all(len(part) == 1 or sum(part) <= step_work for part in parts)
        assert all(sum(part) + later[0] > step_work for part, later in itertools.pairwise(parts))  # none too many
        firsts = [unit.first for unit in units if unit.kind == "encode_tile" and unit.index == 0]
        assert firsts[-1] < count <= firsts[-1] + size


def test_layers_with_windows_have_a_program_of_their_own_and_the_work_of_their_keys() -> None:
    vision = replace(SMOLVLM, image_patches=None, merge=2, num_layers=3, window=8, full_layers=(1, 7))
    tiles = divide(vision, (4096,), WORK)
    assert tiles is not None and tiles.window_layers == (0, 2)
    kinds = {unit.index: unit.kind for unit in units_of(tiles, 2048, 4096) if unit.kind.endswith("tile")}
    assert kinds == {0: "encode_window_tile", 1: "encode_tile", 2: "encode_window_tile"}
    window, image = (unit_work(vision, Unit(kind), 2048, 4096) for kind in ("encode_window_tile", "encode_tile"))
    assert image - window == 2048 * 2 * (4096 - (128 + 2 * 64)) * 768
    whole = {unit.kind for unit in whole_units_of(tiles, 4096)}
    assert {"encode_layer", "encode_window_layer"} <= whole and not any(kind.endswith("tile") for kind in whole)


def test_a_call_that_is_no_more_than_a_part_is_one_program() -> None:
    tower = replace(SMOLVLM, hidden_size=1152, intermediate_size=4304, num_layers=27, num_heads=16)
    shape = image_shape(tower, ImagesConfig(), "gpu", 2)
    assert shape.buckets == (1024, 4096)
    assert divide(tower, shape.buckets, 10**13) is None
    tiles = divide(tower, shape.buckets, 128 * 8_000_000_000)
    assert tiles is not None and tiles.sizes == (0, 4096)  # parts of whole layers
    ends = dict(part_ends(tower, tiles, shape.buckets, 128 * 8_000_000_000))
    assert ends[1024] == (1,) and len(ends[4096]) == 2


def test_activations_between_parts_are_counted_for_the_largest_call_that_has_some() -> None:
    shape = image_shape(replace(SMOLVLM, image_patches=None), ImagesConfig(), "cpu", 4)
    assert shape.buckets == (4096,) and shape.activations == ()
    divided = replace(shape, tiles=divide(SMOLVLM, shape.buckets, 1))
    assert divided.activations == ((4096, 768), *3 * ((4096, 12, 64),))
    assert divided.num_bytes(4) - shape.num_bytes(4) == 4 * 4096 * 768 * 4
