"""Two tensors of a GGUF file in place of one that Hugging Face has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.errors import CheckpointError
from jaxserve.quant.tensor import TensorInfo


class Pair(NamedTuple):
    """Ends of names: of the two tensors, after the name of their module, and of the tensor that they make."""

    first: str
    second: str
    whole: str


ShapeOf = Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...] | None]
"""Returns the shape of the tensor that two of these shapes make, or None if they do not fit each other."""


def with_joined(
    checkpoint: Checkpoint, pair: Pair, shape_of: ShapeOf, read: Callable[[str, Checkpoint], Any], expected: str
) -> Checkpoint:
    """Return the checkpoint with one tensor in float32 in place of each pair.

    read: returns the tensor of a module. expected: what the two are, for the error. Raises CheckpointError if one of the two is
    missing, their shapes do not fit, or the file has the tensor that they make, too.
    """
    tensors, readers = dict(checkpoint.tensors), {}
    modules = (name.removesuffix(end) for end in pair[:2] for name in checkpoint.tensors if name.endswith(end))
    for module in dict.fromkeys(modules):
        first, second = (tensors.pop(module + end, None) for end in pair[:2])
        shape = first and second and shape_of(first.shape, second.shape)
        if first is None or second is None or not shape or module + pair.whole in tensors:
            shapes = [None if info is None else info.shape for info in (first, second)]
            raise CheckpointError(
                f"{checkpoint.path}: '{module}': {expected}; found shapes {shapes[0]} and {shapes[1]}"
            )
        tensors[module + pair.whole] = _joined(first, second, module + pair.whole, shape)
        readers[module + pair.whole] = partial(read, module)
    return CheckpointView(checkpoint, tensors, readers) if readers else checkpoint


def _joined(first: TensorInfo, second: TensorInfo, name: str, shape: tuple[int, ...]) -> TensorInfo:
    num_bytes = first.num_stored_bytes + second.num_stored_bytes
    return replace(first, name=name, shape=shape, stored_dtype="F32", num_stored_bytes=num_bytes, is_quantized=False)
