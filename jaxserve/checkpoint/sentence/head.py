"""Tensors of an embedding head (`model_config.embedding_head`), which checkpoints name differently or have in folders beside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path

import numpy as np

from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.renamed import EMBEDDING, HEAD
from jaxserve.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from jaxserve.checkpoint.sentence.folders import modules_directory
from jaxserve.model_config.embedding_head import EmbeddingHead, HeadLayer
from jaxserve.quant.tensor import Tensor, TensorInfo, as_floats

_FILE = "model.safetensors"
_PARAMETERS = ("weight", "bias")
_Found = tuple[str, TensorInfo, Callable[[Checkpoint], Tensor]]
"""Our name of a tensor in its layer, and how it is stored and read."""


def with_head(checkpoint: Checkpoint, head: EmbeddingHead) -> Checkpoint:
    """Return the checkpoint with the head's tensors under the names of the module `head`. Raises CheckpointError.

    A file with some of a model's tensors has none of the folders beside the model.
    """
    tensors, readers = dict(checkpoint.tensors), {}
    for index, layer in enumerate(head.layers):
        folder, _, module = layer.name.rpartition("/")
        if layer.token_ids:
            found = _from_output_head(checkpoint, layer)
        else:
            found = _in_folder(checkpoint.path, folder, module) if folder else _inside(checkpoint, layer)
        for own, info, read in found:
            if not layer.token_ids:
                tensors.pop(info.name, None)
            name = f"head.layers.{index}.{own}"
            tensors[name], readers[name] = replace(info, name=name), read
    return CheckpointView(checkpoint, tensors, readers)


def _in_folder(model: Path, folder: str, module: str) -> Iterator[_Found]:
    """Yield the tensors of a module in a folder beside the model: our name, and how they are stored and read."""
    base = modules_directory(model) if model.is_dir() else None
    if base is None:
        return
    file = open_safetensors(base / folder / _FILE)
    for parameter in _PARAMETERS:
        stored = file.tensors.get(f"{module}.{parameter}")
        if stored is not None:
            info = TensorInfo(stored.name, stored.shape, stored.dtype, stored.num_bytes, file.path)
            yield f"dense.{parameter}", info, partial(_read, file, stored.name)


def _read(file: SafetensorsFile, name: str, model: Checkpoint) -> Tensor:
    return file.read(name)


def _from_output_head(checkpoint: Checkpoint, layer: HeadLayer) -> Iterator[_Found]:
    """Yield the weights that rows of the output head make. A file with some of a model's tensors may have none."""
    name = next((each for each in (HEAD, EMBEDDING) if each in checkpoint.tensors), None)
    if name is not None:
        shape = (1, checkpoint.tensors[name].shape[1])
        info = replace(
            checkpoint.tensors[name], shape=shape, stored_dtype="F32", num_stored_bytes=4 * shape[1], is_quantized=False
        )
        yield "dense.weight", info, partial(_difference, name, layer.token_ids)


def _difference(name: str, token_ids: tuple[int, ...], model: Checkpoint) -> Tensor:
    matrix = model.read(name)
    first, *others = (as_floats(matrix[token_id : token_id + 1]).astype(np.float32) for token_id in token_ids)
    return first - others[0] if others else first


def _inside(checkpoint: Checkpoint, layer: HeadLayer) -> Iterator[_Found]:
    """Yield the tensors of a module among those of the model."""
    for stored, own in ((layer.name, "dense"), (layer.norm, "norm")):
        for parameter in _PARAMETERS if stored is not None else ():
            name = f"{stored}.{parameter}"
            if name in checkpoint.tensors:
                yield f"{own}.{parameter}", checkpoint.tensors[name], methodcaller("read", name)
