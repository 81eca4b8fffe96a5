"""Quantised checkpoints, as formats read them from config.json and the tensors' headers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from jaxserve.model_config.decoder import CheckpointQuantization
from jaxserve.quant.names import NO_QUANTIZATION
from jaxserve.quant.tensor import Tensor, TensorInfo

COMPRESSED_TENSORS: Final = "compressed-tensors"
Read = Callable[[str], np.ndarray]
"""Reads a stored tensor by name."""
ReadMatrix = Callable[[Read], Tensor]
"""Reads a matrix from its stored tensors."""
_USUALLY_PLAIN: Final = ("lm_head", "model.embed_tokens")
"""Modules that are taken for not quantised where there is only a config."""


class CheckpointForm(ABC):
    """One kind of quantised checkpoint, read from `quantization_config`."""

    is_kept: bool
    """True if a format stores the matrices as the checkpoint does; False: they are dequantised as they are loaded."""

    @property
    @abstractmethod
    def kept(self) -> CheckpointQuantization:
        """The format and its parameters if matrices are kept as they are stored."""

    @property
    @abstractmethod
    def note(self) -> str:
        """Advice for a user whose matrices are dequantised as they are loaded."""

    @abstractmethod
    def take_matrices(self, tensors: dict[str, TensorInfo]) -> dict[str, ReadMatrix]:
        """Replace the tensors of each quantised matrix by one entry with its name and shape; return how to read those.

        Raises CheckpointError if a tensor is missing or has another shape.
        """

    def quantization(self, tensors: Mapping[str, TensorInfo] | None = None) -> CheckpointQuantization:
        """Return how the matrices are served. tensors: decide by them, not by the config, which of them are quantised."""
        is_kept = self.is_kept
        if tensors is not None:
            is_kept = is_kept and any(info.is_quantized for info in tensors.values())
        if not is_kept:
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
