"""Encoder calls in parts: how many parts a call has, and the parameters of the programs that its layers share.

While replies are generated, an encoder call goes before a step, and each reply waits for both. A call with more arithmetic than
the largest step is therefore divided into parts of consecutive layers, each of which goes before a step of its own. The
activations stay on the device between them.

The layers of a tower differ only in their parameters, so one program serves all of them: a call of it gets the parameters of
another layer in the place of the first layer's. A part is one such call for each of its layers, so that the number of its
layers is no property of a program. Four small programs take the place of a large one, and less is compiled than without parts:

    encode_start        pixels to the input of the first layer
    encode_layer        one layer
    encode_deepstack    features of a layer's output, to their columns of the rows of embeddings
    encode_end          the output of the last layer to embeddings
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import jax
from jaxserve_kernels.segment_attention import QUERY_BLOCK

from jaxserve.checkpoint.vision_names import VISION
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.skeleton import AnySkeleton
from jaxserve.types import ProgramKind


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """The division of encoder calls into parts."""

    counts: tuple[int, ...]
    """Parts of a call of each size, in the order of `ImageShape.buckets`; 1: a program has the whole call."""
    num_layers: int
    deepstack_layers: tuple[int, ...]
    """Layers whose outputs become deepstack features, as in `VisionConfig`."""
    hidden_size: int  # D


def divide(vision: VisionConfig, buckets: tuple[int, ...], step_work: int) -> EncoderParts | None:
    """Return the parts of encoder calls of these numbers of patches; None if none is divided.

    step_work: multiplications of the largest step on one device. A part has at most as many, or one layer.
    """
    counts = []
    for size in buckets:
        num_layers = max(1, step_work // layer_work(vision, size))
        counts.append(-(-vision.num_layers // num_layers))
    if max(counts, default=1) == 1:
        return None
    return EncoderParts(tuple(counts), vision.num_layers, vision.deepstack_layers, vision.hidden_size)


def layer_work(vision: VisionConfig, num_patches: int) -> int:
    """Return the multiplications of one layer for `num_patches` patches: those with weights, and attention to all keys it reads."""
    width = vision.num_heads * vision.head_dim
    weights = vision.hidden_size * (4 * width + (2 if vision.layers == "pre" else 3) * vision.intermediate_size)
    longest = min(vision.most_patches or num_patches, num_patches)
    keys = vision.image_patches or min(num_patches, QUERY_BLOCK + 2 * longest)
    return num_patches * (weights + 2 * keys * width)


_SHARED: Final[dict[ProgramKind, str]] = {"encode_layer": "layers", "encode_deepstack": "deepstack"}
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
