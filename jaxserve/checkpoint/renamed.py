"""A checkpoint under other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, TensorInfo

_DECODER_PREFIX: Final = "model."
_ENCODER_PREFIXES: Final = ("bert", "roberta")


@dataclass(frozen=True, slots=True)
class RenamedCheckpoint:
    """A checkpoint with other names for its tensors."""

    inner: Checkpoint
    tensors: Mapping[str, TensorInfo]
    """By their new names."""
    names: Mapping[str, str]
    """The old name of each."""

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
        return self.inner.read(self.names[name])


def with_decoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same with the names of a whole language model, where it was saved without its head and so without `model.`.

    sentence-transformers saves decoders that embed like this.
    """
    if any(name.startswith(_DECODER_PREFIX) for name in checkpoint.tensors):
        return checkpoint
    return _renamed(checkpoint, lambda name: _DECODER_PREFIX + name)


def with_encoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same with the names of an encoder by itself, where it was saved with a head and so with a prefix."""

    def bare(name: str) -> str:
        prefix, _, rest = name.partition(".")
        return rest if prefix in _ENCODER_PREFIXES else name

    return _renamed(checkpoint, bare)


def _renamed(checkpoint: Checkpoint, rename: Callable[[str], str]) -> Checkpoint:
    names = {rename(name): name for name in checkpoint.tensors}
    tensors = {new: replace(checkpoint.tensors[old], name=new) for new, old in names.items()}
    return RenamedCheckpoint(checkpoint, tensors, names)
