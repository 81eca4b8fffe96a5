"""A GGUF file presented as a Hugging Face checkpoint: names, config and row order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.gguf.architecture import NO_WEIGHTS, GGUFArchitecture, split_halves
from jaxserve.checkpoint.gguf.config import find_family, generation_config, hf_config
from jaxserve.checkpoint.gguf.file import GGUFFile, open_gguf
from jaxserve.checkpoint.gguf.mixers import GATED_NORM, LOG_DECAY, mixer_shape
from jaxserve.checkpoint.gguf.mmproj import MmprojFile
from jaxserve.checkpoint.renamed import MULTIMODAL, our_name
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.tensor import Tensor, TensorInfo

_SHARED_GATE: Final = ".shared_expert_gate.weight"
"""A matrix of one row, which converters store as a vector."""


@dataclass(frozen=True, slots=True)
class GGUFCheckpoint:
    """A Checkpoint over one GGUF file or a split model."""

    file: GGUFFile
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    stored_names: Mapping[str, str]
    """llama.cpp's name by Hugging Face name."""
    permuted_heads: Mapping[str, int]
    """Number of heads in a tensor whose rows are reordered, by Hugging Face name."""
    norm_offset: float
    """Offset that the file adds to norm weights."""

    @property
    def path(self) -> Path:
        """The GGUF file; of a split model the first."""
        return self.file.path

    def read(self, name: str) -> Tensor:
        """Return a tensor in Hugging Face's row order: a view of the file if nothing has to change.

        Matrices of quantised types are returned in their blocks; those of all experts are one tensor.
        """
        stored_name = self.stored_names.get(name)
        if stored_name is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected in the checkpoint, found none")
        num_heads = self.permuted_heads.get(name)
        shape = self.tensors[name].shape
        if self.tensors[name].is_quantized:
            blocks = self.file.read_blocks(stored_name)
            if len(shape) > 2:
                return replace(blocks, blocks=blocks.blocks.reshape(*shape[:-1], -1))
            return blocks if num_heads is None else blocks[split_halves(np.arange(len(blocks.blocks)), num_heads)]
        array = self.file.read(stored_name).reshape(shape)
        if name.endswith(LOG_DECAY):
            return self._log_decay(name, array)
        if self.norm_offset and name.endswith("norm.weight") and not name.endswith(GATED_NORM):
            return array.astype(np.float32) - np.float32(self.norm_offset)
        return array if num_heads is None else split_halves(array, num_heads)

    def _log_decay(self, name: str, decay: np.ndarray) -> np.ndarray:
        if not (decay < 0).all():
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected negative numbers, found others")
        return np.log(-decay.astype(np.float32))


def open_gguf_checkpoint(path: Path, families: Collection[Family], mmproj: MmprojFile | None = None) -> GGUFCheckpoint:
    """Open a GGUF file of one of `families`; raise CheckpointError for a tensor that its decoder does not have.

    mmproj: the image encoder that the config describes, too; its tensors are not among those of the result.
    """
    file = open_gguf(path)
    family = find_family(file, families)
    architecture = family.gguf
    assert architecture is not None, "find_family returns families with GGUF files"
    config = hf_config(file, family.architectures[0], architecture)
    if mmproj is not None:
        config[MULTIMODAL] = mmproj.config(file)
    mtp_blocks = _mtp_blocks(file, architecture, config)
    renames = {} if architecture.renames is None else architecture.renames(config)
    stored_names: dict[str, str] = {}
    for stored_name in file.tensors:
        if stored_name in NO_WEIGHTS or stored_name.startswith(mtp_blocks):
            continue
        name = architecture.hf_name(stored_name, config["num_hidden_layers"], has_experts="num_experts" in config)
        name = None if name is None else our_name(renames, name)
        if name is None or name in stored_names:
            raise CheckpointError(
                f"{path}: tensor {shown(stored_name)}: expected the tensors of a decoder with "
                f"{config['num_hidden_layers']} layers, found one that has no place in it"
            )
        stored_names[name] = stored_name
    return GGUFCheckpoint(
        file=file,
        config=config,
        generation_config=generation_config(file, config),
        tensors={name: _info(file, name, stored_name) for name, stored_name in stored_names.items()},
        stored_names=stored_names,
        permuted_heads=_permuted_heads(file, stored_names, config, architecture),
        norm_offset=architecture.norm_offset,
    )


def _mtp_blocks(file: GGUFFile, architecture: GGUFArchitecture, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of the tensors of multi-token-prediction layers, which are not read."""
    blocks = range(config["num_hidden_layers"], file.metadata[f"{architecture.name}.block_count"])
    return tuple(f"blk.{block}." for block in blocks)


def _permuted_heads(
    file: GGUFFile, stored_names: Mapping[str, str], config: dict[str, Any], architecture: GGUFArchitecture
) -> dict[str, int]:
    """Return the heads of tensors whose rows are reordered, by Hugging Face name: as many as they have, if layers differ."""
    if not architecture.is_rope_permuted:
        return {}
    heads_by_projection = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    permuted = {}
    for name, stored_name in stored_names.items():
        num_heads = heads_by_projection.get(name.split(".")[-2])
        if num_heads is None:
            continue
        found = file.tensors[stored_name].shape[0]
        if architecture.varies_by_layer:
            num_heads = max(found // config["head_dim"], 1)
        expected = num_heads * config["head_dim"]
        if found != expected:
            raise CheckpointError(
                f"{file.path}: tensor {shown(stored_name)}: expected {expected} rows "
                f"({num_heads} heads of {config['head_dim']}), found {found}"
            )
        permuted[name] = num_heads
    return permuted


def _info(file: GGUFFile, name: str, stored_name: str) -> TensorInfo:
    tensor = file.tensors[stored_name]
    is_quantized = tensor.kind.block_elements > 1 and len(tensor.shape) > 1
    own_shape = mixer_shape(name, tensor.shape)
    if own_shape is not None:
        return TensorInfo(name, own_shape, tensor.kind.name, tensor.num_bytes, tensor.file)
    shape = (1, *tensor.shape) if name.endswith(_SHARED_GATE) and len(tensor.shape) == 1 else tensor.shape
    return TensorInfo(name, shape, tensor.kind.name, tensor.num_bytes, tensor.file, is_quantized)
