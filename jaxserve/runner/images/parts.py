"""Encoder calls in parts: the programs that a call consists of, how they are divided, and the parameters that they share.

While replies are generated, encoder work goes before a step, and each reply waits for both. A call with more arithmetic than
that may have is therefore a list of calls of small programs, which are divided into parts, each before a step of its own. The
activations stay on the device between them.

Attention needs keys and values of the whole image, and all else of a layer only its own patches. So a layer has two programs, and
each computes a tile of patches at a time:

    encode_start        pixels to the input of the first layer
    encode_heads        queries, keys and values of a tile; for each tile, in each layer
    encode_tile         attention and feed-forward block of a tile, in place; for each tile, after all heads of the layer
    encode_window_tile  the same as encode_tile, with attention within windows, in layers that have some
    encode_layer_heads, encode_layer, encode_window_layer    the same three for all patches at once, for calls that are not divided
    encode_deepstack    features of a layer's output, to their columns of the rows of embeddings
    encode_end          the output of the last layer to embeddings

The layers of a tower differ only in their parameters, so one program serves all of them: a call of it gets the parameters of
another layer in the place of the first layer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import jax
from jaxserve_kernels.segment_attention import QUERY_BLOCK

from jaxserve.checkpoint.vision_names import VISION
from jaxserve.model_config.vision import Connector, VisionConfig
from jaxserve.models.skeleton import AnySkeleton
from jaxserve.types import ProgramKind

MIN_TILE: Final = 128
"""Fewest patches of a tile: fewer would read a layer's weights too often."""
MOST_TILES: Final = 16
"""Most tiles of a call: more would divide a large image into too many parts."""


EncoderParts = tuple[tuple[int, tuple[int, ...]], ...]
"""Numbers of patches, and where each part of a call with up to as many ends: see `ImageInfo.encoder_parts`."""


@dataclass(frozen=True, slots=True)
class EncoderTiles:
    """The tiles in which an encoder computes its layers."""

    sizes: tuple[int, ...]
    """Patches of a tile in calls of each size, in the order of `ImageShape.buckets`; 0: a program has the whole call."""
    num_layers: int
    deepstack_layers: tuple[int, ...]
    """Layers whose outputs become deepstack features, as in `VisionConfig`."""
    hidden_size: int  # D
    heads: tuple[int, int]  # N, H
    window_layers: tuple[int, ...] = ()
    """Layers whose patches attend within windows."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One call of a program."""

    kind: ProgramKind
    index: int = 0
    """Number of the module whose parameters it gets: see `SharedParams`."""
    first: int = 0
    """First patch of its tile."""


_WHOLE: Final[dict[ProgramKind, ProgramKind]] = {
    "encode_heads": "encode_layer_heads",
    "encode_tile": "encode_layer",
    "encode_window_tile": "encode_window_layer",
}
"""Kinds of programs for all patches of a call, by those for a tile."""
WHOLE_KINDS: Final = frozenset(_WHOLE.values())


@cache
def whole_units_of(tiles: EncoderTiles, num_patches: int) -> tuple[Unit, ...]:
    """Return the calls of a call that is not divided: those of a tile with all its patches."""
    units = units_of(tiles, num_patches, num_patches)
    return tuple(replace(unit, kind=_WHOLE.get(unit.kind, unit.kind)) for unit in units)


@cache
def units_of(tiles: EncoderTiles, tile: int, num_patches: int) -> tuple[Unit, ...]:
    """Return the calls that encode `num_patches` patches in tiles of `tile`, in their order."""
    firsts = range(0, num_patches, tile)
    units = [Unit("encode_start")]
    for layer in range(tiles.num_layers):
        units += [Unit("encode_heads", layer, first) for first in firsts]
        kind: ProgramKind = "encode_window_tile" if layer in tiles.window_layers else "encode_tile"
        units += [Unit(kind, layer, first) for first in firsts]
        if layer in tiles.deepstack_layers:
            units.append(Unit("encode_deepstack", tiles.deepstack_layers.index(layer)))
    return (*units, Unit("encode_end"))


def divide(vision: VisionConfig, buckets: tuple[int, ...], step_work: int) -> EncoderTiles | None:
    """Return the tiles of encoder calls of these numbers of patches; None if none is divided.

    step_work: multiplications that encoder work before a step may have on one device. Tiles are as large as that allows.
    """
    sizes = tuple(_tile_size(vision, size, step_work) for size in buckets)
    if not any(sizes):
        return None
    heads = (vision.num_heads, vision.head_dim)
    return _tiles(vision, sizes, heads)


def _tiles(vision: VisionConfig, sizes: tuple[int, ...], heads: tuple[int, int]) -> EncoderTiles:
    return EncoderTiles(
        sizes, vision.num_layers, vision.deepstack_layers, vision.hidden_size, heads, vision.window_layers
    )


def _tile_size(vision: VisionConfig, num_patches: int, step_work: int) -> int:
    """Return the patches of a tile in calls of `num_patches` patches; 0: the whole call is no more than `step_work`, or has no layers,
    some with convolutions, some whose outputs the connector reads, too, or some for windows instead of patches."""
    if not vision.num_layers or vision.conv_layers or vision.feature_layers or vision.merger_layer is not None:
        return 0
    whole = _tiles(vision, (num_patches,), (0, 0))
    units = units_of(whole, num_patches, num_patches)
    if sum(unit_work(vision, unit, num_patches, num_patches) for unit in units) <= step_work:
        return 0
    size, count = num_patches, 1
    while (
        size > MIN_TILE and count < MOST_TILES and unit_work(vision, Unit("encode_tile"), size, num_patches) > step_work
    ):
        count *= 2
        size = -(-num_patches // count // vision.block) * vision.block
    return size


def part_ends(
    vision: VisionConfig, tiles: EncoderTiles, buckets: tuple[int, ...], step_work: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield numbers of patches, the smallest first, and where each part of a call with up to as many ends among its units.

    A part has at most `step_work` multiplications, or one unit. Tiles without a patch are left out of a call.
    """
    smallest = 0
    for size, tile in zip(buckets, tiles.sizes, strict=True):
        if not tile:
            yield size, (1,)
        for count in range(tile, size + tile, tile) if tile else ():
            if count > smallest:
                yield min(count, size), _ends(vision, units_of(tiles, tile, min(count, size)), tile, size, step_work)
        smallest = size


def _ends(vision: VisionConfig, units: tuple[Unit, ...], tile: int, size: int, step_work: int) -> tuple[int, ...]:
    ends, left = [], step_work
    for number, unit in enumerate(units):
        work = unit_work(vision, unit, tile, size)
        if number and work > left:
            ends.append(number)
            left = step_work
        left -= work
    return (*ends, len(units))


def unit_work(vision: VisionConfig, unit: Unit, tile: int, num_patches: int) -> int:
    """Return the multiplications of a call: those with weights, and attention to all keys that it reads."""
    width, d = vision.num_heads * vision.head_dim, vision.hidden_size
    match unit.kind:
        case "encode_start":
            return num_patches * vision.patch_values * d
        case "encode_heads":
            return tile * 3 * d * width
        case "encode_tile" | "encode_window_tile":
            longest = min(vision.most_patches or num_patches, num_patches)
            if unit.kind == "encode_window_tile" and vision.window is not None:
                longest = min(longest, vision.window**2)
            keys = vision.image_patches or min(num_patches, QUERY_BLOCK + 2 * longest)
            feed_forward = (2 if vision.layers == "pre" else 3) * vision.intermediate_size * d
            return tile * (d * width + feed_forward + 2 * keys * width)
    connector = vision.deepstack_connector if unit.kind == "encode_deepstack" else vision.connector
    return int(vision.num_rows(num_patches)) * _connector_work(vision, connector)


def _connector_work(vision: VisionConfig, connector: Connector) -> int:
    """Return the multiplications with weights for one row."""
    d, joint, outputs = vision.hidden_size, vision.block * vision.feature_width, vision.output_size
    match connector:
        case "projector" | "normed_projector" | "patch_normed_projector":
            return (joint + outputs) * (vision.connector_width or outputs)
        case "merged_projector":
            return joint * d + (d + outputs) * (vision.connector_width or outputs)
        case "downsampled":
            return outputs * (joint + outputs + 3 * (vision.connector_width or outputs))
        case "activated" | "activated_normed":
            width = vision.connector_width or outputs
            return width * (joint + width + outputs)
        case "gated_projector" | "normed_gated_projector":
            return (vision.connector_width or outputs) * (2 * joint + outputs) // 2
        case "tabled":
            return (joint + outputs) * ((vision.connector_width or 0) - vision.num_marks)
        case "placed":
            return (joint + outputs) * outputs
        case "mlp" | "rms_mlp":
            return (joint + outputs) * (vision.connector_width or joint)
        case "rms_mlp_linear":
            width = vision.connector_width or outputs
            return joint * (joint + width) + width * outputs
        case "mean_projector":
            return (d + outputs) * outputs
        case "linear" | "biased_linear":
            return joint * outputs
    return d * outputs


_SHARED: Final[dict[ProgramKind, str]] = {
    "encode_heads": "layers",
    "encode_tile": "layers",
    "encode_window_tile": "layers",
    "encode_layer_heads": "layers",
    "encode_layer": "layers",
    "encode_window_layer": "layers",
    "encode_deepstack": "deepstack",
}
"""Lists of alike modules of the tower, by the kind of the program that they share."""


class SharedParams:
    """Chooses the parameters for programs that several modules of the encoder share."""

    def __init__(self, skeleton: AnySkeleton) -> None:
        self._places = {kind: _places(skeleton, name) for kind, name in _SHARED.items()}
        """Places of the arrays of each module."""

    def of(self, params: tuple[jax.Array, ...], kind: ProgramKind, index: int) -> tuple[jax.Array, ...]:
        """Return the parameters of a program whose module is number `index`: those of that module in the place of the first one's."""
        places = self._places.get(kind)
        if places is None or not index:
            return params
        chosen = list(params)
        for place, other in zip(places[0], places[index], strict=True):
            chosen[place] = params[other]
        return tuple(chosen)


def _places(skeleton: AnySkeleton, name: str) -> list[list[int]]:
    """Return the places of the arrays of each module in a list of the tower."""
    pattern = re.compile(rf"{re.escape(VISION)}{name}\.(\d+)\.")
    places: list[list[int]] = []
    count = 0
    for leaf in skeleton.leaves:
        found = pattern.match(leaf.name)
        if found is not None:
            index = int(found[1])
            places += [[] for _ in range(index + 1 - len(places))]
            places[index] += range(count, count + len(leaf.arrays))
        count += len(leaf.arrays)
    first = [skeleton.arrays[place] for place in places[0]] if places else []
    assert all([skeleton.arrays[place] for place in each] == first for each in places), "the modules are alike"
    return places
