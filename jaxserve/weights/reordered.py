"""Queries and keys in the order in which kernels turn them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.layers.rope import row_order
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.quant.array import Tensor

_ROTATED: Final = ("q_proj", "k_proj", "q_norm", "k_norm")

_ADDED: Final = ".lora_B"
"""What adapters add to queries and keys has rows as these have."""


@dataclass(frozen=True, slots=True)
class ReorderedCheckpoint(CheckpointView):
    """A checkpoint whose heads of queries and keys have their rows in another order: weights, biases, scales and norms."""

    order: np.ndarray
    """Of the rows of a head."""

    def read(self, name: str) -> Tensor:
        tensor = self.inner.read(name)
        if not name.rpartition(".")[0].removesuffix(_ADDED).endswith(_ROTATED):
            return tensor
        starts = np.arange(0, self.tensors[name].shape[0], len(self.order))
        return tensor[(starts[:, None] + self.order).ravel()]


def with_rotary_order(checkpoint: Checkpoint, config: DecoderConfig | EncoderConfig) -> Checkpoint:
    """The same for a decoder whose pairs of dimensions are not where kernels look for them (see `row_order`)."""
    order = row_order(config) if isinstance(config, DecoderConfig) else None
    return checkpoint if order is None else ReorderedCheckpoint(checkpoint, checkpoint.tensors, order)
