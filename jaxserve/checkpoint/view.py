"""A checkpoint whose tensors are seen in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.protocol import Checkpoint, TensorInfo


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """What stays as it is; how tensors are read is for the classes derived from it."""

    inner: Checkpoint
    tensors: Mapping[str, TensorInfo]

    @property
    def path(self) -> Path:
        return self.inner.path

    @property
    def config(self) -> dict[str, Any]:
        return self.inner.config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self.inner.generation_config
