"""Pooling of a checkpoint's embeddings, read from the files that sentence-transformers saves beside a model.

modules.json lists the stages of a text: the model, a pooling, perhaps a normalisation. Without it, the server's settings
decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import read_object, read_objects
from jaxserve.errors import CheckpointError, shown
from jaxserve.types import Pooling

_MODES: Final[Mapping[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MAX_TOKENS: Final = 1 << 27


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Reduction from token vectors to one vector per text."""

    pooling: Pooling
    normalizes: bool
    max_tokens: int | None
    """Longest text the model was trained on; None: not given."""


def read_sentence_modules(directory: Path) -> SentenceModules | None:
    """Read the modules of `directory`; None without modules.json. Raises CheckpointError for an unsupported module."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    pooling: Pooling | None = None
    normalizes = False
    for module in read_objects(path):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(directory / _folder(path, module) / "config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise CheckpointError(f"{path}: module {shown(kind)}: supported: Transformer, Pooling, Normalize")
    if pooling is None:
        raise CheckpointError(f"{path}: expected a module of type Pooling, found none")
    return SentenceModules(pooling, normalizes, _max_tokens(directory / "sentence_bert_config.json"))


def _folder(path: Path, module: Mapping[str, Any]) -> str:
    folder = module.get("path")
    if not isinstance(folder, str) or "/" in folder or "\\" in folder or folder.startswith("."):
        raise CheckpointError(f"{path}: path: expected the name of a folder beside it, found {shown(str(folder))}")
    return folder


def _pooling(path: Path) -> Pooling:
    config = read_object(path)
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        found = ", ".join(map(shown, modes)) or "none"
        raise CheckpointError(f"{path}: expected one of {', '.join(_MODES)} to be true, found {found}")
    return _MODES[modes[0]]


def _max_tokens(path: Path) -> int | None:
    value = read_object(path).get("max_seq_length") if path.is_file() else None
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= _MAX_TOKENS:
        raise CheckpointError(f"{path}: max_seq_length: expected an integer from 1 to {_MAX_TOKENS}, found {value!r}")
    return value
