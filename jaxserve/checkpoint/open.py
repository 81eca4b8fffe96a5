"""Open the checkpoint at a path, whatever its format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jaxserve.checkpoint.converted import is_converted, open_converted
from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import STACKED
from jaxserve.checkpoint.gguf.checkpoint import open_gguf_checkpoint
from jaxserve.checkpoint.gguf.delta_net import with_joined_gates
from jaxserve.checkpoint.gguf.latent import with_joined_latents
from jaxserve.checkpoint.gguf.per_layer import with_each_stream
from jaxserve.checkpoint.gguf.value_heads import with_grouped_values
from jaxserve.checkpoint.gguf.xielu import with_activations
from jaxserve.checkpoint.huggingface import open_huggingface
from jaxserve.checkpoint.maxtext.checkpoint import open_maxtext
from jaxserve.checkpoint.maxtext.folder import is_orbax
from jaxserve.checkpoint.parts import split_fused, with_each_expert, with_flat_vectors
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError

_GGUF_MAGIC = b"GGUF"


def open_checkpoint(path: Path, families: Collection[Family]) -> Checkpoint:
    """Open a Hugging Face directory, a conversion, a MaxText checkpoint or a GGUF file.

    Raises CheckpointError in one line.
    """
    if path.is_dir() and is_converted(path):
        return open_converted(path, families)
    if path.is_dir() and is_orbax(path):
        return open_maxtext(path, families)
    if path.is_dir():
        return open_huggingface(path, families)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise CheckpointError(
            f"{path}: expected a GGUF file or a directory with config.json and safetensors, "
            f"found a file that starts with {magic!r}"
        )
    checkpoint = with_joined_gates(with_joined_latents(open_gguf_checkpoint(path, families)))
    checkpoint = with_activations(with_each_stream(with_grouped_values(checkpoint)))
    if any(STACKED in name for name in checkpoint.tensors):
        checkpoint = with_each_expert(checkpoint, "halves")
    return split_fused(with_flat_vectors(checkpoint))
