"""A Hugging Face directory: config.json, generation_config.json and safetensors, whole or in shards.

Nothing in it is executed: `auto_map` is ignored, and pickle weights are rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from jaxserve.checkpoint.drafters.form import DrafterForm
from jaxserve.checkpoint.drafters.mtp import as_first_layer, mtp_config, only_mtp_layer
from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.files import INDEX_FILE, MODEL_OPTIMIZER, read_config, read_object
from jaxserve.checkpoint.gguf.factors import check_not_multiplied
from jaxserve.checkpoint.parts import (
    split_fused,
    with_each_expert,
    with_flat_vectors,
    with_joined_tables,
    with_transposed,
)
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.renamed import (
    EMBEDDING,
    HEAD,
    architecture,
    renamed,
    text_config,
    with_decoder_names,
    with_our_names,
    with_text_names,
    with_zero_corrections,
    without_mtp_layers,
    without_unused,
)
from jaxserve.checkpoint.safetensors_file import SafetensorsFile, open_safetensors
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.checkpoint import Read, ReadMatrix
from jaxserve.quant.kv_scales import take_kv_scales
from jaxserve.quant.registry import read_form
from jaxserve.quant.tensor import Tensor, TensorInfo

_SINGLE_FILE = "model.safetensors"
_NEEDS_SCALES: Final = "F8_E4M3"
"""A stored dtype that means nothing without a scale."""
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})


@dataclass(frozen=True, slots=True)
class HuggingFaceCheckpoint:
    """A Checkpoint whose names, shapes and config are those of the directory."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: Mapping[Path, SafetensorsFile]

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as stored: a read-only view of its shard, unmapped with its last reference."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected in the checkpoint, found none")
        return self.shards[info.file].read(name)


def open_huggingface(directory: Path, families: Collection[Family]) -> Checkpoint:
    """Open a directory and validate every shard's header; `families` say how tensors are named."""
    checkpoint = _with_our_tensors(_open_stored(directory, families), families)
    return _with_embedding(checkpoint, _find_family(checkpoint.config, families))


def open_mtp_layer(directory: Path, families: Collection[Family]) -> Checkpoint:
    """Open the first multi-token-prediction layer of a directory, as a decoder of one layer (`checkpoint.drafters.mtp`).

    Raises CheckpointError in one line if there is none that is served.
    """
    whole = _open_stored(directory, families)
    try:
        layer = replace(whole, config=mtp_config(whole.config, families)[0])
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    num_layers = whole.config.get("num_hidden_layers")
    if type(num_layers) is not int:
        raise CheckpointError(
            f"{directory}: key 'num_hidden_layers': expected a number, found {shown(str(num_layers))}"
        )
    family = _find_family(layer.config, families)
    stored = _with_quantized_matrices(only_mtp_layer(with_text_names(layer), num_layers, families))
    return _with_single_matrices(_with_family_names(as_first_layer(stored, num_layers, families), family), family)


def open_drafter(directory: Path, form: DrafterForm, families: Collection[Family]) -> Checkpoint:
    """Open a drafter of this form as a decoder with its layers. Raises CheckpointError in one line."""
    whole = _open_stored(directory, families)
    try:
        own, inputs = form.read(whole.config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    named = form.with_names(replace(whole, config=own, generation_config={}), inputs)
    return _with_single_matrices(_with_quantized_matrices(named), _find_family(own, families))


def _open_stored(directory: Path, families: Collection[Family]) -> HuggingFaceCheckpoint:
    """Open a directory with all tensors under the names that they have there."""
    index = directory / INDEX_FILE
    if (directory / _SINGLE_FILE).is_file():
        shards = {directory / _SINGLE_FILE: open_safetensors(directory / _SINGLE_FILE)}
        tensors = {name: _info(shard, name) for shard in shards.values() for name in shard.tensors}
    elif index.is_file():
        weight_map = _weight_map(index)
        shards = {file: open_safetensors(file) for file in sorted(set(weight_map.values()))}
        _check_presence(weight_map, shards, index)
        tensors = {name: _info(shards[file], name) for name, file in weight_map.items()}
    else:
        raise CheckpointError(_no_weights(directory))
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise CheckpointError(f"{config_file}: expected the model's configuration, found no such file")
    generation_file = directory / "generation_config.json"
    return HuggingFaceCheckpoint(
        path=directory,
        config=text_config(read_config(directory), families),
        generation_config=read_object(generation_file) if generation_file.is_file() else {},
        tensors=tensors,
        shards=shards,
    )


def huggingface_files(directory: Path) -> dict[str, Path]:
    """Return the files that the parameters of a directory depend on, by name: the shards, their index and the configs.

    Raises CheckpointError in one line.
    """
    single, index = directory / _SINGLE_FILE, directory / INDEX_FILE
    files = [single] if single.is_file() else [index, *sorted(set(_weight_map(index).values()))]
    configs = [directory / name for name in ("config.json", MODEL_OPTIMIZER)]
    return {file.name: file for file in (*files, *filter(Path.is_file, configs))}


def open_tensors(file: Path, like: Checkpoint, families: Collection[Family]) -> Checkpoint:
    """Open a safetensors file with some of the tensors of a model, which `like` is; they are floats, named as in its
    Hugging Face directory. Raises CheckpointError in one line."""
    check_not_multiplied(like.config, str(file))
    shard = open_safetensors(file)
    config = {key: value for key, value in like.config.items() if key != "quantization_config"}
    tensors = {name: _info(shard, name) for name in shard.tensors}
    return _with_our_tensors(HuggingFaceCheckpoint(file, config, {}, tensors, {file: shard}), families)


def _with_our_tensors(checkpoint: HuggingFaceCheckpoint, families: Collection[Family]) -> Checkpoint:
    """Return the checkpoint with a tensor for each matrix, under the names that families of decoders share."""
    family = _find_family(checkpoint.config, families)
    named = _with_family_names(without_mtp_layers(with_text_names(checkpoint)), family)
    named = named if family is None else with_decoder_names(named)
    return _with_single_matrices(_with_quantized_matrices(named), family)


def _with_embedding(checkpoint: Checkpoint, family: Family | None) -> Checkpoint:
    """Return the checkpoint with the embedding matrix of a decoder that stores it as its output head only."""
    if family is None or HEAD not in checkpoint.tensors or EMBEDDING in checkpoint.tensors:
        return checkpoint
    try:
        is_tied = family.decoder_config(dict(checkpoint.config)).tied_embeddings
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    return renamed(checkpoint, lambda name: EMBEDDING if name == HEAD else name) if is_tied else checkpoint


def _with_family_names(checkpoint: Checkpoint, family: Family | None) -> Checkpoint:
    if family is None:
        return checkpoint
    try:
        unused = (*family.unused_tensors, *family.config_unused(checkpoint.config))
        family.check_tensors(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    named = with_our_names(
        without_unused(checkpoint, unused), {**family.renames, **family.config_renames(checkpoint.config)}
    )
    return with_zero_corrections(named) if family.has_optional_corrections else named


def _with_single_matrices(checkpoint: Checkpoint, family: Family | None) -> Checkpoint:
    """Return the checkpoint with a tensor for each matrix of those that it stores together."""
    named = with_joined_tables(with_flat_vectors(checkpoint))
    if family is None:
        return split_fused(named)
    if family.stacked_experts is not None:
        named = with_each_expert(named, family.stacked_experts)
    return split_fused(with_transposed(named, family.transposed), family)


def _find_family(config: Mapping[str, Any], families: Collection[Family]) -> Family | None:
    """Return the family of a decoder; None for encoders and unknown architectures, which the registry rejects."""
    name = architecture(config)
    return next((family for family in families if name in family.architectures), None)


def _with_quantized_matrices(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with each matrix and its scales as one tensor, and scales of the KV cache under one kind of name;
    unchanged if nothing is quantised.

    Raises CheckpointError in one line if a scale is missing or has another shape, or no format reads the checkpoint.
    """
    form, tensors = read_form(checkpoint.config), dict(checkpoint.tensors)
    kv_scales, kv_readers = take_kv_scales(checkpoint.config, tensors)
    matrices = {} if form is None else form.take_matrices(tensors)
    if any(info.stored_dtype == _NEEDS_SCALES and name not in matrices for name, info in tensors.items()):
        raise CheckpointError(
            f"{checkpoint.path}: {_NEEDS_SCALES} tensors, but no quantization_config that says what they are"
        )
    readers = {name: partial(_read_matrix, read) for name, read in (matrices | kv_readers).items()}
    return CheckpointView(checkpoint, tensors | kv_scales, readers) if readers else checkpoint


def _read_matrix(read: ReadMatrix, inner: Checkpoint) -> Tensor:
    return read(cast(Read, inner.read))  # stored tensors are plain arrays


def _weight_map(index: Path) -> dict[str, Path]:
    entries = read_object(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{index}: key 'weight_map': expected a table of tensor to file name, found none")
    weight_map = {}
    for name, file_name in entries.items():
        if not _is_plain_name(file_name):
            raise CheckpointError(
                f"{index}: tensor {shown(name)}: expected the plain name of a .safetensors file beside the index, "
                f"found {shown(str(file_name))}"
            )
        weight_map[name] = index.parent / file_name
    for file in sorted(set(weight_map.values())):
        if not file.is_file():
            raise CheckpointError(f"{index}: expected the shard {shown(file.name)} beside it, found no such file")
    return weight_map


def _check_presence(weight_map: Mapping[str, Path], shards: Mapping[Path, SafetensorsFile], index: Path) -> None:
    for name, file in weight_map.items():
        if name not in shards[file].tensors:
            raise CheckpointError(f"{file}: tensor {shown(name)}: expected here by {index.name}, found none")


def _is_plain_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and not any(character in name for character in "/\\\0")
    )


def _no_weights(directory: Path) -> str:
    try:
        files = sorted(file for file in directory.iterdir() if file.is_file())
    except OSError as error:
        return f"{directory}: cannot be read: {error.strerror}"
    gguf_files = [file for file in files if file.suffix == ".gguf"]
    if gguf_files:
        return f"{directory}: expected {_SINGLE_FILE}, found GGUF files; give one of them, such as {gguf_files[0]}"
    if any(file.suffix in _PICKLE_SUFFIXES for file in files):
        return f"{directory} has only pickle weights; convert to safetensors (pickle files can run code)"
    return f"{directory}: expected {_SINGLE_FILE} or {INDEX_FILE}, found neither"


def _info(shard: SafetensorsFile, name: str) -> TensorInfo:
    tensor = shard.tensors[name]
    return TensorInfo(name, tensor.shape, tensor.dtype, tensor.num_bytes, shard.path)
