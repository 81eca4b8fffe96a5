"""Quantised checkpoints, as formats read them from config.json and the tensors' headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.quant.names import NO_QUANTIZATION
from jaxserve.quant.tensor import Tensor, TensorInfo

T = TypeVar("T")
COMPRESSED_TENSORS: Final = "compressed-tensors"
MODELOPT: Final = "modelopt"
"""Value of `quant_method` of NVIDIA's Model Optimizer."""
FP8_ALGORITHMS: Final = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
"""Values of `quant_algo` of the Model Optimizer for 8-bit floats with a scale for each matrix or output."""
Read = Callable[[str], np.ndarray]
"""Reads a stored tensor by name."""
ReadMatrix = Callable[[Read], Tensor]
"""Reads a matrix from its stored tensors."""
INSTEAD: Final = "a checkpoint in f32, f16 or bf16 (--quantization makes it small), or a GGUF file"
_MAX_SHOWN: Final = 80
_USUALLY_PLAIN: Final = ("lm_head", "model.embed_tokens")
"""Modules that are taken for not quantised where there is only a config."""


@dataclass(frozen=True, slots=True)
class CheckpointForm:
    """One kind of quantised checkpoint, read from `quantization_config`."""

    take_matrices: Callable[[dict[str, TensorInfo]], dict[str, ReadMatrix]]
    """Replace the tensors of each quantised matrix by one entry with its name and shape; return how to read those.

    Raises CheckpointError if a tensor is missing or has another shape.
    """
    kept: CheckpointQuantization | None = None
    """The format that stores the matrices as the checkpoint does; None: they are dequantised as they are loaded."""
    note: str = ""
    """Advice for a user whose matrices are dequantised as they are loaded."""

    def quantization(self, tensors: Mapping[str, TensorInfo] | None = None) -> CheckpointQuantization:
        """Return how the matrices are served. tensors: decide by them, not by the config, which of them are quantised."""
        if self.kept is None or (tensors is not None and not any(info.is_quantized for info in tensors.values())):
            return CheckpointQuantization(NO_QUANTIZATION, note=self.note)
        return replace(self.kept, plain_matrices=_USUALLY_PLAIN if tensors is None else _plain_matrices(tensors))


@dataclass(frozen=True, slots=True)
class CheckpointForms:
    """The kinds of checkpoint that a format reads: `CHECKPOINTS` of its module."""

    methods: tuple[str, ...]
    """Values of `quant_method`, for errors."""
    read: Callable[[Mapping[str, Any]], CheckpointForm | None]
    """Reads `quantization_config`; None: not of these kinds. Raises CheckpointError for what is not supported."""
    compressed: str = ""
    """The kinds of compressed-tensors that are read, for errors."""


def _plain_matrices(tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    matrices = (info for info in tensors.values() if len(info.shape) == 2 and info.name.endswith(".weight"))
    return tuple(sorted(info.name.removesuffix(".weight") for info in matrices if not info.is_quantized))


def unsupported(key: str, value: object, supported: str) -> CheckpointError:
    """Return the error for a value that is not read. key: below `quantization_config`, with a dot before it."""
    text = repr(value) if len(repr(value)) <= _MAX_SHOWN else repr(value)[:_MAX_SHOWN] + "..."
    return CheckpointError(f"model config: quantization_config{key} is {text}; supported: {supported}")


def misshapen(info: TensorInfo, expected: str) -> CheckpointError:
    """Return the error for a stored tensor of another shape or type."""
    return CheckpointError(
        f"{info.file}: tensor {shown(info.name)}: expected {expected}, found shape {info.shape} of {info.stored_dtype}"
    )


def only_scheme(found: Mapping[str, Any], read: Callable[[str, Mapping[str, Any]], T]) -> T:
    """Return read(key, group) of the `config_groups` of compressed-tensors, which must be the same for every group. Raises CheckpointError."""
    groups = _groups(found)
    if found.get("transform_config"):
        raise unsupported(".transform_config", found["transform_config"], "none")
    schemes = {read(f".config_groups.{name}", group) for name, group in groups.items()}
    if len(schemes) > 1:
        raise unsupported(".config_groups", sorted(groups), "groups that are quantised alike")
    return schemes.pop()


def has_weights(found: Mapping[str, Any], kind: str, num_bits: int) -> bool:
    """Return True if a group of compressed-tensors has weights of this type, such as "float", and size."""
    groups = found.get("config_groups")
    tables = groups.values() if isinstance(groups, dict) else ()
    return any(_has_type(table.get("weights"), kind, num_bits) for table in tables if isinstance(table, dict))


def are_symmetric(table: Any, kind: str, num_bits: int) -> bool:
    """Return True if a table of compressed-tensors describes numbers of this type and size without offsets."""
    return _has_type(table, kind, num_bits) and table.get("symmetric", True) is True


def _has_type(table: Any, kind: str, num_bits: int) -> bool:
    return isinstance(table, dict) and (table.get("type"), table.get("num_bits")) == (kind, num_bits)


def unsupported_weights(found: Mapping[str, Any], supported: str) -> CheckpointError:
    """Return the error for groups that no format reads."""
    name, group = next(iter(_groups(found).items()))
    return unsupported(f".config_groups.{name}.weights", group.get("weights"), supported)


def _groups(found: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise unsupported(".config_groups", groups, "a table of groups with `weights`")
    return groups
