"""Reading of checkpoint files: JSON, bounded in size and without duplicate keys, and read-only views of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from jaxserve.errors import CheckpointError, shown

MAX_HEADER_BYTES = 100_000_000
"""Largest header of either format: the biggest real ones (262k-token vocabularies) are near 15 MB."""
INDEX_FILE: Final = "model.safetensors.index.json"
"""File that names the shard of each tensor."""
MODEL_OPTIMIZER: Final = "hf_quant_config.json"
"""File in which NVIDIA's Model Optimizer describes the quantisation; its later versions write it into config.json as well."""
_QUANTIZATION: Final = "quantization_config"
_FLOAT: Final = "__float__"
"""The only key of the object that transformers 5 writes for a number that JSON has not; its value names the number."""
_FLOATS: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_VOCABULARIES: Final = ("tokenizer.json", "vocab.*", "*[!n].model", "*[!e]n.model")
"""Files that a tokenizer is read or converted from: any model of SentencePiece, but not tiktoken.model."""
TIKTOKEN: Final = "tiktoken.model"
"""File of byte strings and ranks, which do not say how a text is divided."""
_TIKTOKEN_CODE: Final = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
"""Classes in repositories of Moonshot AI that all read this file in the same way."""


def file_size(path: Path) -> int:
    """Return the size in bytes of a regular file; raise CheckpointError if it cannot be read."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: expected a file, found {'a directory' if path.is_dir() else 'nothing'}")
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def map_array(
    path: Path, dtype: np.dtype, shape: tuple[int, ...], *, offset: int, expected_file_size: int
) -> np.ndarray:
    """Return a read-only array over a validated range of the file.

    Each call maps anew: pages are unmapped with the last view, so that reading a checkpoint tensor by tensor never
    makes the whole file resident. The size is compared again, because reading past the end of a file that shrank
    since it was opened would kill the process (SIGBUS).
    """
    found = file_size(path)
    if found != expected_file_size:
        raise CheckpointError(
            f"{path}: the file changed while it was being read: expected {expected_file_size} bytes, found {found}"
        )
    if 0 in shape:
        return np.empty(shape, dtype)
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse the JSON object in `text`; `what` opens the error message."""
    value = _parse(text, what)
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    return parse_object(_read(path), str(path))


def expect_model_folder(directory: Path) -> None:
    """Raise CheckpointError for a folder without config.json; it names a GGUF file that the folder has instead."""
    if (directory / "config.json").is_file():
        return
    file = min(directory.glob("*.gguf"), default=None)
    hint = "the folder of a model has one, beside its weights and tokenizer.json" if file is None else f"give {file}"
    raise CheckpointError(f"{directory}: no config.json: {hint}")


def expect_tokenizer_files(directory: Path, subject: str) -> None:
    """Raise CheckpointError if only code of the checkpoint can read its tokenizer; `subject` opens the message."""
    path = directory / "tokenizer_config.json"
    if not path.is_file() or any(any(directory.glob(each)) for each in _VOCABULARIES):
        return
    config = read_object(path)
    if is_tokenizer_code(config) and not has_known_ranks(directory, config):
        raise code_error(subject)


def is_tokenizer_code(config: Mapping[str, Any]) -> bool:
    """Return True if the repository has code for its tokenizer. config: tokenizer_config.json."""
    return _tokenizer_code(config) is not None


def code_error(subject: str) -> CheckpointError:
    """Return the error for a tokenizer that only code of the checkpoint can read; `subject` opens the message."""
    return CheckpointError(
        f"{subject}: no tokenizer.json, and its tokenizer is code (auto_map in tokenizer_config.json), which is not run; "
        "put a tokenizer.json of the same tokens beside the weights in a local folder, and give its path"
    )


def has_known_ranks(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if the tokenizer is a file of ranks whose code is known. config: tokenizer_config.json."""
    return _tokenizer_code(config) in _TIKTOKEN_CODE and (directory / TIKTOKEN).is_file()


def _tokenizer_code(config: Mapping[str, Any]) -> str | None:
    """Return the class of the repository that reads its tokenizer, without the name of the repository; None: there is none."""
    auto_map = config.get("auto_map")
    found = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    name = found[0] if isinstance(found, list) and found else found
    return None if found is None else str(name).rpartition("--")[2]


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json, with `quantization_config` from the Model Optimizer's file beside it if it has none itself."""
    expect_model_folder(directory)
    config, beside = read_object(directory / "config.json"), directory / MODEL_OPTIMIZER
    if config.get(_QUANTIZATION) is not None or not beside.is_file():
        return config
    found = read_object(beside).get("quantization")
    if not isinstance(found, dict):
        raise CheckpointError(f"{beside}: key 'quantization': expected a table, found {type(found).__name__}")
    return {**config, _QUANTIZATION: {"quant_method": "modelopt", **found}}


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Read the list of JSON objects in a file."""
    value = _parse(_read(path), str(path))
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CheckpointError(f"{path}: expected a list of JSON objects, found {type(value).__name__}")
    return value


def _read(path: Path) -> bytes:
    size = file_size(path)
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: expected at most {MAX_HEADER_BYTES} bytes, found {size}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _parse(text: bytes, what: str) -> Any:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any] | float:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{what}: key {shown(key)}: expected each key once, found a duplicate")
            found[key] = value
        number = found.get(_FLOAT) if len(found) == 1 else None
        return _FLOATS.get(number, found) if isinstance(number, str) else found

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: expected JSON, found {_reason(error)}") from error


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "too deep nesting"
    if isinstance(error, UnicodeDecodeError):
        return "bytes that are not UTF-8"
    return str(error).splitlines()[0]
