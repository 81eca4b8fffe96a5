"""Open the checkpoint at a path, whatever its format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jaxserve.checkpoint.converted import converted_files, is_converted, open_converted
from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import STACKED
from jaxserve.checkpoint.gguf.checkpoint import open_gguf_checkpoint
from jaxserve.checkpoint.gguf.delta_net import with_joined_gates
from jaxserve.checkpoint.gguf.latent import with_joined_latents
from jaxserve.checkpoint.gguf.mmproj import open_mmproj, with_tower
from jaxserve.checkpoint.gguf.per_layer import with_each_stream
from jaxserve.checkpoint.gguf.split import gguf_files
from jaxserve.checkpoint.gguf.value_heads import with_grouped_values
from jaxserve.checkpoint.gguf.xielu import with_activations
from jaxserve.checkpoint.huggingface import huggingface_files, open_huggingface
from jaxserve.checkpoint.maxtext.checkpoint import maxtext_files, open_maxtext
from jaxserve.checkpoint.maxtext.folder import is_orbax
from jaxserve.checkpoint.parts import split_fused, with_each_expert, with_flat_vectors
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError

_GGUF_MAGIC = b"GGUF"


def open_checkpoint(path: Path, families: Collection[Family], mmproj: Path | None = None) -> Checkpoint:
    """Open a Hugging Face directory, a conversion, a MaxText checkpoint, a GGUF file, or a split GGUF model by its first file.

    mmproj: the GGUF file with the image encoder of a GGUF text model. Raises CheckpointError in one line.
    """
    if path.is_dir() and mmproj is not None:
        raise CheckpointError(
            f"--mmproj {mmproj}: goes with a model in a GGUF file; the image encoder of {path} is in that directory, if it has one"
        )
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
    tower = None if mmproj is None else open_mmproj(mmproj)
    checkpoint = with_joined_gates(with_joined_latents(open_gguf_checkpoint(path, families, tower)))
    checkpoint = with_activations(with_each_stream(with_grouped_values(checkpoint)))
    if any(STACKED in name for name in checkpoint.tensors):
        checkpoint = with_each_expert(checkpoint, "halves")
    checkpoint = split_fused(with_flat_vectors(checkpoint))
    return checkpoint if tower is None else with_tower(checkpoint, tower)


def checkpoint_files(path: Path, mmproj: Path | None = None) -> dict[str, Path]:
    """Return the files that the parameters of a checkpoint depend on, by names that do not depend on where it is.

    Other files of its folder, such as a tokenizer or the state of an optimizer, are left out. path, mmproj: as for
    `open_checkpoint`; `path` may be a safetensors file as well. Raises CheckpointError in one line.
    """
    if not path.is_dir():
        return {file.name: file for file in gguf_files(path)} | ({} if mmproj is None else {"mmproj": mmproj})
    if is_converted(path):
        return converted_files(path)
    return maxtext_files(path) if is_orbax(path) else huggingface_files(path)
