"""Checkpoints whose tensors get other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.quant.tensor import Tensor

_DECODER_PREFIX: Final = "model."
_ENCODER_PREFIXES: Final = ("bert", "roberta")


@dataclass(frozen=True, slots=True)
class RenamedCheckpoint(CheckpointView):
    """A checkpoint with other tensor names."""

    names: Mapping[str, str]
    """Stored name by new name."""

    def read(self, name: str) -> Tensor:
        return self.inner.read(self.names[name])


def with_decoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """Add the prefix `model.` to a decoder saved without its head, as sentence-transformers saves decoders."""
    if any(name.startswith(_DECODER_PREFIX) for name in checkpoint.tensors):
        return checkpoint
    return renamed(checkpoint, lambda name: _DECODER_PREFIX + name)


def with_our_names(checkpoint: Checkpoint, renames: Mapping[str, str]) -> Checkpoint:
    """Replace the components of tensor names that `renames` lists."""
    if not renames:
        return checkpoint
    return renamed(checkpoint, lambda name: ".".join(renames.get(part, part) for part in name.split(".")))


def without_mtp_layers(checkpoint: Checkpoint) -> Checkpoint:
    """Leave out the multi-token-prediction layers that follow the last layer of some decoders (DeepSeek-V3, GLM-4.5)."""
    count, first = (checkpoint.config.get(key) for key in ("num_nextn_predict_layers", "num_hidden_layers"))
    if not isinstance(count, int) or not isinstance(first, int):
        return checkpoint
    prefixes = tuple(f"model.layers.{first + index}." for index in range(count))
    return renamed(checkpoint, lambda name: None if name.startswith(prefixes) else name)


def with_encoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """Remove the prefix of an encoder that was saved with a head."""

    def bare(name: str) -> str:
        prefix, _, rest = name.partition(".")
        return rest if prefix in _ENCODER_PREFIXES else name

    return renamed(checkpoint, bare)


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> Checkpoint:
    """Return the checkpoint with new tensor names; tensors whose new name is None are left out."""
    names = {new: name for name in checkpoint.tensors if (new := rename(name)) is not None}
    tensors = {new: replace(checkpoint.tensors[old], name=new) for new, old in names.items()}
    return RenamedCheckpoint(checkpoint, tensors, names)
