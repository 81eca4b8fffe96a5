"""What every checkpoint format offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the validated header describes it, in Hugging Face's name and shape."""

    name: str
    shape: tuple[int, ...]
    stored_dtype: str
    """As the file says: "F32", "BF16", "Q4_1", ..."""
    num_stored_bytes: int
    file: Path


class Checkpoint(Protocol):
    """An opened checkpoint. Opening validates every header; nothing of tensor size is allocated."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`, or what it would be (GGUF)."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`; empty when there is none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By Hugging Face name (`model.layers.0.self_attn.q_proj.weight`)."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor: float32, float16 or bfloat16 (ml_dtypes) as stored, float32 where dequantised.

        float8_e4m3fn where there is also a tensor `NAME_scale` with a float32 factor for each row. int8 where `NAME_scale`
        has one for each row and group of inputs, [O, G]; with it may be `NAME_offset`, what is then added.
        Raises CheckpointError naming file and tensor.
        """
        ...
