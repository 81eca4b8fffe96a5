"""The interface of every checkpoint format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxserve.quant.tensor import Tensor, TensorInfo


class Checkpoint(Protocol):
    """An opened checkpoint. Opening validates every header; nothing of tensor size is allocated."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`, or its equivalent for a GGUF file."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`; empty if there is none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`)."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor: float32, float16 or bfloat16 (ml_dtypes) as stored, float32 if it was dequantised, or its
        quantised values with their scales (`TensorInfo.is_quantized`).

        Raises CheckpointError naming file and tensor.
        """
        ...


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint that changes how some tensors of another are named or read."""

    inner: Checkpoint
    tensors: Mapping[str, TensorInfo]
    readers: Mapping[str, Callable[[Checkpoint], Tensor]]
    """Functions that read tensors from `inner`, by name; it reads the others itself."""

    def read(self, name: str) -> Tensor:
        reader = self.readers.get(name)
        return self.inner.read(name) if reader is None else reader(self.inner)

    @property
    def path(self) -> Path:
        return self.inner.path

    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self.inner.generation_config
