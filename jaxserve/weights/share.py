"""Finds the part of a matrix that one device holds, and that is cut from stored blocks or groups: see `Cutting`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.models.skeleton import LeafSpec
from jaxserve.quant.array import ArraySpec, QuantArray, Ranges
from jaxserve.quant.format import Cutting
from jaxserve.quant.tensor import scaled


@dataclass(frozen=True, slots=True)
class Share:
    """One device's part of a matrix."""

    leaf: LeafSpec
    """The matrix, with only the parts of its arrays that the device holds."""
    cutting: Cutting
    experts: range | None
    outputs: range
    inputs: range


def share_of(leaf: LeafSpec, held: Sequence[Ranges]) -> Share | None:
    """Return what a device holds of a leaf; None if its format does not cut stored tensors. held: the device's part of each array."""
    declared = leaf.declared
    if not isinstance(declared, QuantArray) or declared.format.cutting is None:
        return None
    cutting, num_leading = declared.format.cutting, 0 if leaf.num_experts is None else 1
    own, sizes, axis = held[0][num_leading:], declared.values.shape[num_leading:], cutting.outputs_axis
    outputs = scaled(own[axis], sizes[axis], leaf.own_shape[0])
    inputs = scaled(own[1 - axis], sizes[1 - axis], leaf.own_shape[1])
    assert outputs is not None and inputs is not None, "devices hold equal parts"
    is_whole = len(inputs) == leaf.own_shape[1]
    form = declared.format if is_whole or cutting.of_share is None else cutting.of_share
    part = replace(_with_shapes(declared, held), format=form)
    return Share(replace(leaf, declared=part), cutting, held[0][0] if num_leading else None, outputs, inputs)


def _with_shapes(declared: QuantArray[ArraySpec], held: Sequence[Ranges]) -> QuantArray[ArraySpec]:
    pairs = zip(declared.arrays, held, strict=True)
    return declared.with_arrays(replace(spec, shape=tuple(map(len, ranges))) for spec, ranges in pairs)
