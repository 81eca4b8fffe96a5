"""A model's parameters by name, as the loader places them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.layers.policy import DtypePolicy
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton, make_skeleton
from jaxserve.quant.array import ArraySpec, QuantArray
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.weights.loader import load_params


def array_specs(skeleton: ModelSkeleton | EncoderSkeleton) -> dict[str, ArraySpec]:
    """Return the skeleton's arrays in its order: `NAME`, and of a quantised weight `NAME_scale`, `NAME_offset` and `NAME_matrix_scale`."""
    return dict(_named(skeleton))


def load(folder: Path, policy: DtypePolicy) -> dict[str, np.ndarray]:
    """Return the parameters of the model in `folder`, named as by `array_specs`."""
    checkpoint = open_model(folder)
    decoder = decoder_of(checkpoint)
    skeleton = make_skeleton(decoder, policy)
    params: Sequence[Any] = load_params(checkpoint, skeleton, make_sharding(decoder, MeshShape()), lambda *_: None)
    return {name: np.asarray(array) for name, array in zip(array_specs(skeleton), params, strict=True)}


def _named(skeleton: ModelSkeleton | EncoderSkeleton) -> Iterator[tuple[str, ArraySpec]]:
    for leaf in skeleton.leaves:
        if not isinstance(leaf.declared, QuantArray):
            yield leaf.name, leaf.declared
            continue
        stored = leaf.declared
        parts = {"": stored.values, "_scale": stored.scales, "_offset": stored.offsets}
        parts["_matrix_scale"] = stored.matrix_scales
        yield from ((leaf.name + suffix, part) for suffix, part in parts.items() if part is not None)
