"""A model that `jaxserve convert` wrote: config, tokenizer, and the parameters as devices hold them, in an Orbax checkpoint.

    config.json, tokenizer.json ...    copies of the model's files
    arrays/                            the Orbax checkpoint, one array per array of a parameter
    jaxserve.json                      the manifest, written last: tensors, layout, and the size of every file

A conversion is written beside its place and renamed as a whole, and opening one compares the size of every file with the
manifest. So a folder of which something is missing is never taken for a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.files import file_size, read_object
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.renamed import text_config
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.tensor import Tensor, TensorInfo

MANIFEST_FILE: Final = "jaxserve.json"
ARRAYS: Final = "arrays"
FORMAT: Final = 1


class ConvertedTensor(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint that was converted."""

    name: str
    shape: tuple[int, ...]
    stored_dtype: str
    is_quantized: bool


class ConversionManifest(msgspec.Struct, frozen=True):
    """The content of a conversion."""

    format: int
    source_digest: str
    """Names the weights that were converted."""
    layout: dict[str, str]
    """Everything that the arrays depend on beside the weights, by name."""
    tensors: list[ConvertedTensor]
    files: dict[str, int]
    """Bytes of every other file, by its path in the folder."""


@dataclass(frozen=True, slots=True)
class ConvertedCheckpoint:
    """A Checkpoint whose tensors are described, but can be read as parameters only (`weights.converted`)."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    manifest: ConversionManifest

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(size for name, size in self.manifest.files.items() if name.startswith(f"{ARRAYS}/"))

    def read(self, name: str) -> Tensor:
        raise CheckpointError(f"{self.path}: tensor {shown(name)}: a converted model has parameters, no tensors")


def is_converted(directory: Path) -> bool:
    """Return True if a folder is a conversion."""
    return (directory / MANIFEST_FILE).is_file()


def open_converted(directory: Path, families: Collection[Family]) -> ConvertedCheckpoint:
    """Open a conversion. Raises CheckpointError in one line if it is not whole."""
    path = directory / MANIFEST_FILE
    try:
        manifest = msgspec.convert(read_object(path), ConversionManifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}; convert the model again") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path}: format {manifest.format}, expected {FORMAT}; convert the model again")
    for name, size in manifest.files.items():
        found = file_size(directory / name)
        if found != size:
            raise CheckpointError(f"{directory / name}: expected {size} bytes, found {found}; convert the model again")
    generation = directory / "generation_config.json"
    return ConvertedCheckpoint(
        path=directory,
        config=text_config(read_object(directory / "config.json"), families),
        generation_config=read_object(generation) if generation.is_file() else {},
        tensors={
            tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.stored_dtype, 0, path, tensor.is_quantized)
            for tensor in manifest.tensors
        },
        manifest=manifest,
    )


def converted_files(directory: Path) -> dict[str, Path]:
    """Return the files that the parameters of a conversion depend on, by their path in the folder: the arrays, the manifest and the
    config."""
    arrays = sorted(file for file in (directory / ARRAYS).rglob("*") if file.is_file())
    files = (*arrays, directory / MANIFEST_FILE, directory / "config.json")
    return {str(file.relative_to(directory)): file for file in files}


def converted_of(checkpoint: Checkpoint) -> ConvertedCheckpoint | None:
    """Return the conversion that a checkpoint is, or is a view of; None for any other."""
    while isinstance(checkpoint, CheckpointView):
        checkpoint = checkpoint.inner
    return checkpoint if isinstance(checkpoint, ConvertedCheckpoint) else None
