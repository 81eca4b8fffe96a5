"""Models of odd sizes, one of each family: their configs, weights that a formula makes, and what transformers computes with them.

The weights are not stored. `tests/tools/make_odd_goldens.py` writes `odd_shapes.json` and `odd_shapes.npz`.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from tests.models.goldens import DATA

NUM_LOGITS: Final = 4
Tensors = dict[str, tuple[list[int], float, float]]
"""Shape, mean and spread by the name in the checkpoint."""


@dataclass(frozen=True, slots=True)
class OddModel:
    """A model without stored weights, and its reference in float32."""

    config: dict[str, Any]
    """config.json"""
    tensors: Tensors
    seed: int
    prompt_ids: np.ndarray
    """int32 (40)"""
    logits: np.ndarray
    """float32 (4, V): of the last positions of the prompt."""
    output_ids: np.ndarray
    """int32 (64): greedy after the prompt, not stopping at end tokens."""

    def write(self, folder: Path) -> None:
        """Write a checkpoint."""
        write_checkpoint(folder, self.config, self.tensors, self.seed)


def odd_names() -> list[str]:
    """Return the names of the models."""
    return list(_configs())


def odd_model(name: str) -> OddModel:
    """Return one model."""
    arrays = _arrays()
    golden = {key: arrays[f"{name}/{key}"] for key in ("prompt_ids", "logits", "output_ids")}
    return OddModel(**_configs()[name], **golden)


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: Tensors, seed: int) -> None:
    """Write config.json and the weights that follow from `tensors` and `seed`."""
    (folder / "config.json").write_text(json.dumps(config))
    made = {name: weight(seed, name, *form) for name, form in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def weight(seed: int, name: str, shape: list[int], mean: float, spread: float) -> np.ndarray:
    """Return float32 numbers that are spread evenly around `mean`: NumPy promises the bits of a generator, not those of its distributions."""
    bits = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape))
    even = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0  # -1 to 1
    return (mean + spread * math.sqrt(3) * even).astype(np.float32).reshape(shape)


@cache
def _configs() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "odd_shapes.json").read_text())
    return found


@cache
def _arrays() -> dict[str, np.ndarray]:
    with np.load(DATA / "odd_shapes.npz", allow_pickle=False) as arrays:
        return dict(arrays)
