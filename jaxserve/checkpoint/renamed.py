"""A checkpoint under other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.view import CheckpointView

_DECODER_PREFIX: Final = "model."
_ENCODER_PREFIXES: Final = ("bert", "roberta")
_NORMS_AROUND: Final = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""Gemma's names, and ours, by GLM's."""
_EXPERTS: Final = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Qwen's names, and ours, by Mixtral's."""


@dataclass(frozen=True, slots=True)
class RenamedCheckpoint(CheckpointView):
    """A checkpoint with other names for its tensors."""

    names: Mapping[str, str]
    """The old name of each."""

    def read(self, name: str) -> np.ndarray:
        return self.inner.read(self.names[name])


def with_decoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same with the names of a whole language model, where it was saved without its head and so without `model.`.

    sentence-transformers saves decoders that embed like this.
    """
    if any(name.startswith(_DECODER_PREFIX) for name in checkpoint.tensors):
        return checkpoint
    return renamed(checkpoint, lambda name: _DECODER_PREFIX + name)


def with_norm_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same with Gemma's names for norms on both sides of a block."""
    if not any(".post_self_attn_layernorm." in name for name in checkpoint.tensors):
        return checkpoint
    return renamed(checkpoint, lambda name: ".".join(_NORMS_AROUND.get(part, part) for part in name.split(".")))


def with_expert_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same with Qwen's names for experts, where it has Mixtral's."""
    if not any(".block_sparse_moe." in name for name in checkpoint.tensors):
        return checkpoint
    return renamed(checkpoint, lambda name: ".".join(_EXPERTS.get(part, part) for part in name.split(".")))


def with_encoder_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same with the names of an encoder by itself, where it was saved with a head and so with a prefix."""

    def bare(name: str) -> str:
        prefix, _, rest = name.partition(".")
        return rest if prefix in _ENCODER_PREFIXES else name

    return renamed(checkpoint, bare)


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> Checkpoint:
    """The same under new names, without tensors that get None for a name."""
    names = {new: name for name in checkpoint.tensors if (new := rename(name)) is not None}
    tensors = {new: replace(checkpoint.tensors[old], name=new) for new, old in names.items()}
    return RenamedCheckpoint(checkpoint, tensors, names)
