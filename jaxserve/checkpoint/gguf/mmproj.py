"""An mmproj file (llama.cpp's `--mmproj`): the image encoder and projector of a GGUF text model, as a Hugging Face checkpoint would
describe and store them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxserve.checkpoint.gguf.architecture import GGUFKeys, split_halves
from jaxserve.checkpoint.gguf.file import GGUFFile, open_gguf
from jaxserve.checkpoint.gguf.towers.keys import TowerKeys
from jaxserve.checkpoint.gguf.towers.projector import Projector
from jaxserve.checkpoint.gguf.towers.table import PROJECTORS
from jaxserve.checkpoint.protocol import Checkpoint, CheckpointView
from jaxserve.checkpoint.vision_names import VISION, join_bounds, split_vision_qkv, without_single_axes
from jaxserve.errors import CheckpointError, shown
from jaxserve.quant.tensor import TensorInfo

_SETTING: Final = "--mmproj"
_ARCHITECTURE: Final = "clip"
_AUDIO: Final = ("a.", "mm.a.")
"""Starts of the names of an audio encoder's tensors, which are not read."""
_NAMES: Final[Mapping[str, str]] = {
    "v.patch_embd.": "patch_embedding.",
    "v.position_embd.": "position_embedding.",
    "v.class_embd": "class_embedding",
    "v.pre_ln.": "pre_layernorm.",
    "v.post_ln.": "post_layernorm.",
}
_LAYER: Final[Mapping[str, str]] = {
    "attn_qkv": "attn.qkv",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Our names of parts of a layer."""
_WITHOUT_SUFFIX: Final = ("layer_scale1", "layer_scale2")
_PATCHES: Final = "patch_embedding.weight"
_SWAPPED: Final = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_LAYER_NAME: Final = re.compile(r"v\.blk\.(0|[1-9][0-9]{0,3})\.([a-z0-9_]+)\.(weight|bias|(?:in|out)put_(?:min|max))")
_DEEPSTACK_NAME: Final = re.compile(r"v\.deepstack\.(0|[1-9][0-9]{0,3})\.(norm|fc1|fc2)\.(weight|bias)")
_PERMUTED: Final = re.compile(r"\.self_attn\.[qk]_proj\.")
_FUSED: Final = ".attn.qkv."
_SECOND_FRAME: Final = "v.patch_embd.weight.1"
"""The kernel of patch embeddings for the second of two frames, whose first is in `v.patch_embd.weight`."""


@dataclass(frozen=True, slots=True)
class MmprojFile:
    """An opened mmproj file of a known projector type."""

    file: GGUFFile
    projector: Projector

    @property
    def keys(self) -> TowerKeys:
        return TowerKeys(GGUFKeys(self.file, f"{_ARCHITECTURE}.vision"), GGUFKeys(self.file, _ARCHITECTURE))

    def config(self, text: GGUFFile) -> dict[str, Any]:
        """Return `config.json` of the multimodal model, without the text model's keys.

        text: the text model's file. Raises CheckpointError if both do not go together.
        """
        self._check_text(text)
        with _naming_setting():
            own = {
                "model_type": self.projector.model_type,
                "vision_config": self.projector.vision(self.keys),
                "image_token_id": self._token(text, "image_token")[1],
            }
            return own | self.projector.whole(self.keys)

    def preprocessing(self) -> dict[str, Any]:
        """Return `preprocessor_config.json` of the multimodal model."""
        return {
            "image_processor_type": self.projector.processor_type,
            "image_mean": self.keys.values("image_mean"),
            "image_std": self.keys.values("image_std"),
            **self.projector.preprocessing(self.keys),
        }

    def tokens(self, text: GGUFFile) -> dict[str, str]:
        """Return the texts of control tokens, as `tokenizer_config.json` has them."""
        return {name: self._token(text, name)[0] for name in self.projector.tokens}

    def _token(self, text: GGUFFile, name: str) -> tuple[str, int]:
        """Return the text and the number of a control token."""
        vocabulary, texts = text.metadata.get("tokenizer.ggml.tokens"), self.projector.tokens[name]
        for token in texts:
            if isinstance(vocabulary, list) and token in vocabulary:
                return token, vocabulary.index(token)
        raise self.error(f"its images need the token {' or '.join(texts)}, and the vocabulary of {text.path} has none")

    def _check_text(self, text: GGUFFile) -> None:
        """Raise CheckpointError unless the text model is of the projector's kind and width."""
        kind = str(text.metadata.get("general.architecture"))
        if kind not in self.projector.architectures:
            known = " or ".join(self.projector.architectures)
            raise self.error(
                f"projectors of type {self.projector.kind} go with text models of architecture {known}; {text.path} is "
                f"{shown(kind)}"
            )
        width = GGUFKeys(text, kind).integer("embedding_length")
        last = self.projector.last_matrix
        own = self.keys.vision.integer("projection_dim", minimum=0) if last is None else self.keys.outputs(last)
        if own not in (0, width):  # 0 in some old files
            raise self.error(f"it makes embeddings of {own} numbers, and those of {text.path} have {width}")
        expected, found = text.metadata.get(f"{kind}.n_deepstack_layers"), len(self.keys.deepstack_layers())
        if expected not in (None, found):
            raise self.error(
                f"it has features for {found} layers of the text model, and {text.path} takes those of {expected}"
            )

    def error(self, text: str) -> CheckpointError:
        """Return the error for a file that cannot be used."""
        return CheckpointError(f"{_SETTING} {self.file.path}: {text}")


@contextmanager
def _naming_setting() -> Iterator[None]:
    """Put the setting before an error's text, which starts with the file's path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{_SETTING} {str(error).removeprefix(f'{_SETTING} ')}") from error


def open_mmproj(path: Path) -> MmprojFile:
    """Open the image encoder in a GGUF file. Raises CheckpointError in one line, for one that is not served, too."""
    with _naming_setting():
        file = open_gguf(path)
    if len(file.file_bytes) > 1:
        raise CheckpointError(f"{_SETTING} {path}: expected one file, found the first of {len(file.file_bytes)}")
    kind = file.metadata.get("general.architecture")
    if kind != _ARCHITECTURE:
        raise CheckpointError(
            f"{_SETTING} {path}: expected a GGUF file of an image encoder (general.architecture {_ARCHITECTURE}), found "
            f"{'none' if kind is None else shown(str(kind))}"
        )
    own = (file.metadata.get(f"{_ARCHITECTURE}.{key}") for key in ("vision.projector_type", "projector_type"))
    first = "mlp" if file.metadata.get(f"{_ARCHITECTURE}.has_llava_projector") is True else "none"
    name = str(next((name for name in own if name is not None), first))  # files of 2023 have no other
    if file.metadata.get(f"{_ARCHITECTURE}.has_vision_encoder") is not True:
        raise CheckpointError(
            f"{_SETTING} {path}: it has no image encoder (projector type {shown(name)}), audio is not served"
        )
    if name not in PROJECTORS:
        raise CheckpointError(
            f"{_SETTING} {path}: the projector type {shown(name)} is not supported; supported: {', '.join(PROJECTORS)}"
        )
    return MmprojFile(file, PROJECTORS[name])


def with_tower(checkpoint: Checkpoint, mmproj: MmprojFile) -> Checkpoint:
    """Return a text model's checkpoint with the tensors of an image encoder, quantised ones as floats.

    Raises CheckpointError for a tensor that the encoder does not have.
    """
    tensors, readers = dict(checkpoint.tensors), dict[str, Callable[[Checkpoint], np.ndarray]]()
    file, keys = mmproj.file, mmproj.keys
    is_swapped, deepstack = keys.is_swapped(), keys.deepstack_layers()
    for stored_name, stored in file.tensors.items():
        if stored_name.startswith(_AUDIO) or stored_name in (_SECOND_FRAME, *mmproj.projector.unused):
            continue
        bare = _deepstack_name(stored_name, deepstack) or _our_name(
            mmproj.projector, stored_name, is_swapped=is_swapped
        )
        name = f"{VISION}{bare}"
        if bare is None or name in tensors:
            raise mmproj.error(f"tensor {shown(stored_name)}: it has no place in an image encoder of this type")
        if mmproj.projector.is_rope_permuted and _FUSED in bare:
            raise mmproj.error(f"tensor {shown(stored_name)}: expected queries, keys and values in three tensors")
        is_float = stored.kind.block_elements == 1
        info = TensorInfo(name, stored.shape, stored.kind.name if is_float else "F32", stored.num_bytes, stored.file)
        read = partial(_read, file, stored_name, mmproj.projector.offsets.get(bare, 0.0))
        if mmproj.projector.is_rope_permuted and _PERMUTED.search(name):
            read = partial(_read_halves, file, stored_name, keys.vision.integer("attention.head_count"))
        if (second := file.tensors.get(_SECOND_FRAME)) is not None and stored_name == _SECOND_FRAME.removesuffix(".1"):
            if second.shape != stored.shape:
                raise mmproj.error(
                    f"tensor '{_SECOND_FRAME}': expected the shape {stored.shape} of the first frame's, found {second.shape}"
                )
            shape, count = (*stored.shape[:2], 2, *stored.shape[2:]), stored.num_bytes + second.num_bytes
            info, read = replace(info, shape=shape, num_stored_bytes=count), partial(_read_frames, file, stored_name)
        if mmproj.projector.has_linear_patches and bare == _PATCHES:
            info = replace(info, shape=(stored.shape[0], math.prod(stored.shape[1:])))
            read = partial(_read_linear, file, stored_name)
        tensors[name], readers[name] = info, read
    view = split_vision_qkv(CheckpointView(checkpoint, tensors, readers))
    return without_single_axes(join_bounds(view))


def _our_name(projector: Projector, stored_name: str, *, is_swapped: bool) -> str | None:
    """Return our name of a tensor after VISION; None if there is no such tensor."""
    match = _LAYER_NAME.fullmatch(stored_name)
    if match is not None:
        part = _SWAPPED.get(match[2], match[2]) if is_swapped else match[2]
        own = projector.names.get(part, _LAYER.get(part))
        suffix = "" if own in _WITHOUT_SUFFIX else f".{match[3]}"
        return None if own is None else f"layers.{match[1]}.{own}{suffix}"
    for start, own in {**_NAMES, **projector.names}.items():
        if stored_name == start:
            return own
        if start.endswith(".") and stored_name.startswith(start):
            return own + stored_name.removeprefix(start)
    return None


def _deepstack_name(stored_name: str, layers: Sequence[int]) -> str | None:
    """Return our name of a tensor of the connector of one of these layers; None for other tensors."""
    match = _DEEPSTACK_NAME.fullmatch(stored_name)
    if match is None or int(match[1]) not in layers:
        return None
    part = match[2] if match[2] == "norm" else f"linear_{match[2]}"
    return f"deepstack.{layers.index(int(match[1]))}.{part}.{match[3]}"


def _read(file: GGUFFile, stored_name: str, offset: float, inner: Checkpoint) -> np.ndarray:
    array = file.read(stored_name)
    return array.astype(np.float32) - np.float32(offset) if offset else array


def _read_halves(file: GGUFFile, stored_name: str, num_heads: int, inner: Checkpoint) -> np.ndarray:
    return split_halves(file.read(stored_name), num_heads)


def _read_linear(file: GGUFFile, stored_name: str, inner: Checkpoint) -> np.ndarray:
    kernel = file.read(stored_name)
    return np.moveaxis(kernel, 1, -1).reshape(len(kernel), -1)


def _read_frames(file: GGUFFile, stored_name: str, inner: Checkpoint) -> np.ndarray:
    return np.stack([file.read(name) for name in (stored_name, _SECOND_FRAME)], 2)
