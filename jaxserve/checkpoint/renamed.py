"""A checkpoint under other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, TensorInfo

_DECODER_PREFIX: Final = "model."


@dataclass(frozen=True, slots=True)
class PrefixedCheckpoint:
    """A checkpoint whose names all lack `prefix`, as if they had it."""

    inner: Checkpoint
    prefix: str
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

    def read(self, name: str) -> np.ndarray:
        return self.inner.read(name.removeprefix(self.prefix))


def with_decoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same with the names of a whole language model, where it was saved without its head and so without `model.`.

    sentence-transformers saves decoders that embed like this.
    """
    if any(name.startswith(_DECODER_PREFIX) for name in checkpoint.tensors):
        return checkpoint
    tensors = {
        _DECODER_PREFIX + name: replace(info, name=_DECODER_PREFIX + name) for name, info in checkpoint.tensors.items()
    }
    return PrefixedCheckpoint(checkpoint, _DECODER_PREFIX, tensors)
