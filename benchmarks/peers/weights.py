"""One model in every format that a peer reads, all from one GGUF file or from a folder in Hugging Face's layout.

    source    the file or folder as it is; jaxserve serves it
    gguf      float32, float16 and so on: made by llama.cpp's own converter and `llama-quantize`
    directory Hugging Face's layout in float32: made here, and compared with llama.cpp's float32 file

Whatever precision the source has, all float32 copies hold the same dequantised numbers. A folder is its own `directory`.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.models.registry import open_model
from jaxserve.quant.tensor import as_floats
from jaxserve.tokenizer.gguf_vocab import read_gguf_tokenizer
from jaxserve.tokenizer.source import TokenizerSource
from jaxserve.tokenizer.tokenizer import load_tokenizer
from jaxserve.tools.planning.stored import bytes_by_dtype

SAMPLE_TEXTS = (
    "The capital of France is Paris.",
    "  5 apples, 12345.67 pears",
    "def f(x):\n\treturn {'a': x**2}\n\n",
    "Größe, 東京, 😀 and e\u0301",
)
"""Texts that reveal wrong vocabularies: digits, leading blanks, indents, multi-byte characters."""


class WeightsError(Exception):
    """A copy does not hold what its source does."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Paths of the copies of one model."""

    source: Path
    folder: Path

    @property
    def directory(self) -> Path:
        """Hugging Face's layout: float32, or the source itself."""
        return self.source if self.source.is_dir() else self.folder / "huggingface-f32"

    def gguf(self, format_name: str) -> Path:
        """The GGUF file of a format; the source itself where it is of that format."""
        if self.source.is_dir():
            return self.folder / f"{self.source.name}.{format_name}.gguf"
        if format_name == source_format(self.source):
            return self.source
        return self.folder / f"{self.source.stem.partition('.')[0]}.{format_name}.gguf"


def weights_of(source: Path, folder: Path) -> Weights:
    """Return the copies of a model in the folder of the peers."""
    return Weights(source, folder / "weights" / source.stem)


def source_format(source: Path) -> str:
    """The type of most bytes of a GGUF file: "q4_1"."""
    return next(iter(bytes_by_dtype(open_model(source)))).lower()


def model_type_of(architecture: str) -> str:
    """Return transformers' `model_type` of a class, which GGUF files lack. Raises WeightsError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes_of: dict[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    types = [name for name, classes in classes_of.items() if classes == architecture]
    if not types:
        raise WeightsError(f"transformers has no {architecture}")
    return max(types, key=lambda name: architecture.lower().startswith(name.replace("_", "")))


def write_directory(weights: Weights) -> None:
    """Write `weights.directory`; what is there already is trusted. Raises WeightsError when tokens or numbers differ."""
    if weights.directory.exists():
        return
    unfinished = weights.directory.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    checkpoint = open_model(weights.source)
    further = {"dtype": "float32", "model_type": model_type_of(checkpoint.config["architectures"][0])}
    _write_json(unfinished / "config.json", checkpoint.config | further)
    _write_json(unfinished / "generation_config.json", checkpoint.generation_config)
    _write_tokenizer(unfinished, read_gguf_tokenizer(open_gguf(weights.source).metadata, str(weights.source)))
    write_safetensors(unfinished / "model.safetensors", checkpoint)
    compare_tensors(open_model(unfinished), checkpoint)
    compare_tokens(unfinished, weights.source)
    unfinished.rename(weights.directory)


def write_safetensors(path: Path, checkpoint: Checkpoint) -> None:
    """Every tensor of `checkpoint` in float32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in checkpoint.tensors.items():
        end = offset + 4 * int(np.prod(tensor.shape))
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in checkpoint.tensors:
            file.write(as_floats(checkpoint.read(name)).astype("<f4").tobytes())


def compare_tensors(copy: Checkpoint, original: Checkpoint, tolerance: float = 0.0) -> None:
    """Raises WeightsError unless both hold the same tensors in float32, bit for bit or within a share of each value."""
    if set(copy.tensors) != set(original.tensors):
        differing = sorted(set(copy.tensors) ^ set(original.tensors))
        raise WeightsError(f"{copy.path} and {original.path} differ in {differing[0]} and {len(differing) - 1} more")
    for name in original.tensors:
        ours, theirs = (as_floats(each.read(name)).astype(np.float32) for each in (copy, original))
        if ours.shape != theirs.shape or not np.allclose(ours, theirs, rtol=tolerance, atol=0):
            difference = "shape" if ours.shape != theirs.shape else f"up to {np.abs(ours - theirs).max():.3g}"
            raise WeightsError(f"{name}: {copy.path} and {original.path} differ in {difference}")


def compare_tokens(copy: Path, original: Path) -> None:
    """Raises WeightsError unless both split the sample texts into the same tokens."""
    ours, theirs = load_tokenizer(copy), load_tokenizer(original)
    for text in SAMPLE_TEXTS:
        if ours.encode(text) != theirs.encode(text):
            raise WeightsError(f"{copy} and {original} differ in the tokens of {text!r}")


def _write_tokenizer(directory: Path, source: TokenizerSource) -> None:
    source.backend.save(str(directory / "tokenizer.json"))
    template = source.chat_templates.get("default")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(directory / "tokenizer_config.json", config | dict(source.special_tokens))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), indent=2) + "\n", encoding="utf-8")
