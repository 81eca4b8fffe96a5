"""Partly rotated heads and adjacent pairs: weights, scales, biases and norms move with the rows of a head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.protocol import CheckpointView
from jaxserve.models.registry import decoder_config
from jaxserve.quant.array import QuantArray
from jaxserve.quant.registry import find_format
from jaxserve.quant.tensor import Tensor, TensorInfo
from jaxserve.weights.reader import TensorReader


@dataclass(frozen=True, slots=True)
class Rows(CheckpointView):
    """Two heads of eight numbered rows; a norm has one head."""

    def read(self, name: str) -> Tensor:
        rows = np.arange(8 if "norm" in name else 16)
        if name.endswith((".bias", "norm.weight")):
            return rows
        return QuantArray(find_format("int8"), np.stack([rows, rows + 100], axis=1), rows / 2)


def test_weights_biases_scales_and_norms_of_queries_and_keys_move_together() -> None:
    config = decoder_config(
        {
            "architectures": ["GlmForCausalLM"],
            "vocab_size": 8,
            "hidden_size": 16,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
        }
    )
    names = [f"{part}.{of}" for part in ("q_proj", "k_proj", "v_proj") for of in ("weight", "bias")]
    tensors = {name: TensorInfo(name, (16,), "F32", 64, Path()) for name in names}
    tensors["q_norm.weight"] = TensorInfo("q_norm.weight", (8,), "F32", 32, Path())
    checkpoint = Rows(None, tensors, {})  # type: ignore[arg-type]
    seen = TensorReader(checkpoint, config)
    head = [0, 2, 4, 5, 1, 3, 6, 7]
    both = np.array(head + [8 + row for row in head])
    for name in names:
        expected = checkpoint.read(name) if name.startswith("v_proj") else checkpoint.read(name)[both]
        for found, array in zip(arrays(seen.read(name, range(16))), arrays(expected), strict=True):
            np.testing.assert_array_equal(found, array)
    assert seen.read("q_norm.weight", range(8)).tolist() == head  # type: ignore[union-attr]


def arrays(tensor: Tensor) -> tuple[np.ndarray, ...]:
    """Return values and scales of a matrix, or a plain tensor."""
    return tensor.arrays if isinstance(tensor, QuantArray) else (np.asarray(tensor),)
