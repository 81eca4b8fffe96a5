"""The experts that tokens chose, as they cross from the engine."""

from __future__ import annotations

import msgspec
import numpy as np

from jaxserve.types import expert_dtype


class RoutedExpertsInfo(msgspec.Struct, frozen=True, array_like=True):
    """Sizes of the experts that one token chose."""

    num_layers: int
    """Layers with experts."""
    num_per_token: int
    """Experts per token of a layer."""
    num_experts: int
    """Experts of a layer."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of an expert's number."""
        return np.dtype(expert_dtype(self.num_experts))

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the experts of one token."""
        return self.num_layers, self.num_per_token

    @property
    def token_bytes(self) -> int:
        """Bytes of the experts of one token."""
        return self.num_layers * self.num_per_token * self.dtype.itemsize
