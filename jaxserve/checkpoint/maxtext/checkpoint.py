"""A MaxText checkpoint presented as the Hugging Face checkpoint of the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.family import Family
from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.maxtext.folder import OrbaxArrays, StoredArray, orbax_files
from jaxserve.checkpoint.maxtext.layout import MaxTextLayout, Role
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.renamed import MULTIMODAL, architecture, text_config
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.tensor import TensorInfo

_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NUM_AXES: Final[Mapping[Role, int]] = {
    "query": 3,
    "key": 3,
    "value": 3,
    "out": 3,
    "matrix": 2,
    "bias": 2,
    "norm": 1,
    "head_norm": 1,
}
_EMBEDDING: Final = "token_embedder.embedding"
_LOGITS: Final = "decoder.logits_dense.kernel"
_TOWER: Final = "vision_encoder."
_INTERLEAVED: Final = "llama3"
"""Type of rotary embedding for which MaxText pairs neighbouring dimensions (its `rope_type` llama3.1); else it pairs the two
halves of a head, as Hugging Face's models do."""
_ROPE_TYPES: Final = (None, "default", "linear", _INTERLEAVED)


@dataclass(frozen=True, slots=True)
class _Source:
    """The array that has a tensor, and how it is stored."""

    array: StoredArray
    layer: int | None
    convert: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class MaxTextCheckpoint:
    """A Checkpoint whose tensors are cut out of MaxText's arrays when they are read."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    sources: Mapping[str, _Source]
    arrays: OrbaxArrays

    def read(self, name: str) -> np.ndarray:
        source = self.sources.get(name)
        if source is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: expected in the checkpoint, found none")
        return source.convert(self.arrays.read(source.array, source.layer))


def open_maxtext(directory: Path, families: Collection[Family]) -> MaxTextCheckpoint:
    """Open MaxText's checkpoint of a step, or of the newest step of a run.

    Raises CheckpointError in one line, also for a family whose layout is not known, and for arrays that are not expected.
    """
    folder = _described(directory)
    config = text_config(read_object(folder / "config.json"), families)
    config.pop(MULTIMODAL, None)  # the tower is not read: the model is served for texts
    generation = folder / "generation_config.json"
    arrays = OrbaxArrays(directory)
    layout = _layout(directory, config, families)
    tensors = _Tensors(arrays, config, layout)
    tensors.add_all()
    return MaxTextCheckpoint(
        path=directory,
        config=config,
        generation_config=read_object(generation) if generation.is_file() else {},
        tensors=tensors.infos,
        sources=tensors.sources,
        arrays=arrays,
    )


def maxtext_files(directory: Path) -> dict[str, Path]:
    """Return the files that the parameters of a checkpoint depend on, by name: the arrays, and the config, which may be in a folder above.

    Raises CheckpointError in one line.
    """
    return {**orbax_files(directory), "config.json": _described(directory) / "config.json"}


def stored_path(checkpoint: Checkpoint) -> Path:
    """Return the path that opens an opened checkpoint again: the step of a run, which may have a newer one by now."""
    found = _maxtext_of(checkpoint)
    return checkpoint.path if found is None else found.arrays.folder


def _maxtext_of(checkpoint: Checkpoint) -> MaxTextCheckpoint | None:
    """Return the MaxText checkpoint that a checkpoint is, or is a view of; None for any other."""
    while isinstance(checkpoint, CheckpointView):
        checkpoint = checkpoint.inner
    return checkpoint if isinstance(checkpoint, MaxTextCheckpoint) else None


class ReadingOrder:
    """An order of tensors in which each stacked array of MaxText is read once; other checkpoints keep theirs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = _maxtext_of(checkpoint)

    def position(self, name: str) -> str:
        """Return a sort key for a tensor: that of all tensors of one stacked array; empty if there is none."""
        source = None if self._checkpoint is None else self._checkpoint.sources.get(name)
        return "" if source is None or source.layer is None else source.array.path

    def release(self) -> None:
        """Forget the arrays that were kept, after the tensors of one position."""
        if self._checkpoint is not None:
            self._checkpoint.arrays.release()


def _described(directory: Path) -> Path:
    """Return the folder with config.json: the model's, or for a step that of its run."""
    for folder in (directory, *directory.resolve().parents[:2]):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"{directory}: a MaxText checkpoint, which has no config: copy config.json and the tokenizer's files of the "
        "Hugging Face model that was trained into this folder"
    )


def _layout(path: Path, config: Mapping[str, Any], families: Collection[Family]) -> MaxTextLayout:
    name = architecture(config)
    family = next((family for family in families if name in family.architectures), None)
    if family is None or family.maxtext is None:
        known = sorted(family.architectures[0] for family in families if family.maxtext is not None)
        raise CheckpointError(
            f"{path}: MaxText checkpoints are read for {', '.join(known)}, not for {shown(name or 'a config without architectures')}"
        )
    if not family.maxtext.has_tied_logits and config.get("tie_word_embeddings"):
        raise CheckpointError(
            f"{path}: tie_word_embeddings: expected false for {name}: MaxText divides the logits of tied embeddings by "
            "sqrt(hidden_size), which is not computed"
        )
    return family.maxtext


class _Tensors:
    """Finds the array of each tensor of a decoder."""

    def __init__(self, arrays: OrbaxArrays, config: Mapping[str, Any], layout: MaxTextLayout) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self.sources: dict[str, _Source] = {}
        self._arrays = arrays
        self._unused = {name for name in arrays.arrays if not name.startswith(_TOWER)}
        self._config = config
        self._layout = layout
        self._is_interleaved = _rope_type(arrays.folder, config) == _INTERLEAVED

    def add_all(self) -> None:
        """Add the tensors of the whole model. Raises CheckpointError for an array that belongs to none."""
        vocab = self._integer("vocab_size")
        self._add("model.embed_tokens.weight", _EMBEDDING, None, 2, lambda array: self._embedding(array[:vocab]))
        self._add("lm_head.weight", _LOGITS, None, 2, lambda array: array.T[:vocab])
        self._add("model.norm.weight", "decoder.decoder_norm.scale", None, 1, self._norm)
        num_layers = self._integer("num_hidden_layers")
        modules = self._layout.modules()
        for layer in range(num_layers):
            for path, (name, role) in modules.items():
                for place, index in self._layout.places(path, layer, num_layers).items():
                    convert = self._converter(role)
                    self._add(f"model.layers.{layer}.{name}", f"decoder.{place}", index, _NUM_AXES[role], convert)
                    if role == "query":
                        self._check_heads(f"decoder.{place}")
        if self._unused:
            name = min(self._unused)
            raise CheckpointError(f"{self._arrays.folder}: array {shown(name)} is not expected by the model config")

    def _add(
        self, name: str, path: str, layer: int | None, num_axes: int, convert: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Add a tensor if its array is there. The loader names those that the model lacks."""
        array = self._arrays.arrays.get(path)
        if array is None:
            return
        shape = array.shape if layer is None else (*array.shape[:1], *array.shape[2:])
        length = None if layer is None else self._layout.num_stacked(self._integer("num_hidden_layers"))
        if len(array.shape) != num_axes + (layer is not None) or (length is not None and array.shape[1] != length):
            stacked = "" if length is None else f", the second of {length} layers"
            raise CheckpointError(
                f"{self._arrays.folder}: array {shown(path)}: expected {num_axes + (layer is not None)} axes{stacked}, found "
                f"shape {array.shape}"
            )
        dtype = _DTYPES.get(str(array.dtype))
        if dtype is None:
            raise CheckpointError(
                f"{self._arrays.folder}: array {shown(path)}: expected {', '.join(_DTYPES)}, found {array.dtype}"
            )
        own = convert(np.broadcast_to(np.zeros((), array.dtype), shape)).shape if array.num_bytes else shape
        self.infos[name] = TensorInfo(
            name, own, dtype, math.prod(own) * array.dtype.itemsize, self._arrays.file_of(array)
        )
        self.sources[name] = _Source(array, layer, convert)
        self._unused.discard(path)

    def _check_heads(self, path: str) -> None:
        """Raise CheckpointError if the queries have other heads than the config: products of sizes may still be equal."""
        array, heads = self._arrays.arrays.get(path), self._integer("num_attention_heads")
        if array is not None and array.shape[-2] != heads:
            raise CheckpointError(
                f"{self._arrays.folder}: array {shown(path)}: expected {heads} heads, found {array.shape[-2]}"
            )

    def _converter(self, role: Role) -> Callable[[np.ndarray], np.ndarray]:
        match role:
            case "query":
                return lambda array: _by_outputs(self._unscaled(self._halves(array)))
            case "key":
                return lambda array: _by_outputs(self._halves(array))
            case "value" | "matrix":
                return _by_outputs
            case "out":
                return lambda array: array.reshape(-1, array.shape[-1]).T
            case "bias":
                return np.ravel
            case "norm" | "head_norm":
                return self._norm

    def _halves(self, heads: np.ndarray) -> np.ndarray:
        """Return heads with the first dimensions of all rotary pairs before the second ones."""
        if not self._is_interleaved:
            return heads
        return np.concatenate([heads[..., 0::2], heads[..., 1::2]], axis=-1)

    def _unscaled(self, query: np.ndarray) -> np.ndarray:
        key = self._layout.query_scale
        if key is None or _is_placeholder(query):
            return query
        found = self._config.get(key)
        size = query.shape[-1] if found is None or key == "head_dim" else found
        return query.astype(np.float32) * np.float32(math.sqrt(size))

    def _embedding(self, rows: np.ndarray) -> np.ndarray:
        if self._layout.embedding_divisor is None or _is_placeholder(rows):
            return rows
        divisor = math.sqrt(rows.shape[1])
        if self._layout.embedding_divisor == "bfloat16":
            divisor = float(ml_dtypes.bfloat16(divisor))
        return rows.astype(np.float32) / np.float32(divisor)

    def _norm(self, weights: np.ndarray) -> np.ndarray:
        offset = self._layout.norm_offset
        if not offset or _is_placeholder(weights):
            return weights
        return weights.astype(np.float32) - np.float32(offset)

    def _integer(self, key: str) -> int:
        value = self._config.get(key)
        if not isinstance(value, int) or not 0 < value < 1 << 32:
            raise CheckpointError(f"model config: {key}: expected a positive integer, found {shown(str(value))}")
        return value


def _is_placeholder(array: np.ndarray) -> bool:
    """Return True for a single number in the shape of a tensor: computing with it would take the memory of the tensor."""
    return not any(array.strides)


def _by_outputs(array: np.ndarray) -> np.ndarray:
    """Return (in, ...) as (out, in)."""
    return array.reshape(array.shape[0], -1).T


def _rope_type(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the type of rotary embedding. Raises CheckpointError for one of which MaxText's order is not known."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, dict) else None
    if found not in _ROPE_TYPES:
        known = ", ".join(filter(None, _ROPE_TYPES))
        raise CheckpointError(
            f"{path}: rope_type: expected one of {known} for a MaxText checkpoint, found {shown(found)}"
        )
    return found
