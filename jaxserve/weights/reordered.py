"""Reorders the rows of queries and keys as kernels rotate them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.layers.rope import row_order
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.quant.tensor import Tensor

_ROTATED: Final = ("q_proj", "k_proj", "q_norm", "k_norm")

_ADDED: Final = ".lora_B"
"""Adapters of queries and keys: their up matrices have rows in the same order."""


@dataclass(frozen=True, slots=True)
class ReorderedCheckpoint(CheckpointView):
    """A checkpoint with the rows of query and key heads reordered: weights, scales, biases and norms."""

    order: np.ndarray
    """The stored index of each row of a head."""

    def read(self, name: str) -> Tensor:
        tensor = self.inner.read(name)
        if not name.rpartition(".")[0].removesuffix(_ADDED).endswith(_ROTATED):
            return tensor
        starts = np.arange(0, self.tensors[name].shape[0], len(self.order))
        return tensor[(starts[:, None] + self.order).ravel()]


def with_rotary_order(checkpoint: Checkpoint, config: DecoderConfig | EncoderConfig) -> Checkpoint:
    """Return the checkpoint in the row order of kernels (see `row_order`)."""
    order = row_order(config) if isinstance(config, DecoderConfig) else None
    return checkpoint if order is None else ReorderedCheckpoint(checkpoint, checkpoint.tensors, order)
