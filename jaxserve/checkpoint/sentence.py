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

_MODE: Final = "pooling_mode"
_MODES: Final[Mapping[str, Pooling]] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_SWITCHES: Final[Mapping[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Keys of sentence-transformers before 5.4, one of which is true."""
_LENGTHS: Final = (
    *(
        (f"sentence_{kind}_config.json", "max_seq_length")
        for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
    ("tokenizer_config.json", "model_max_length"),
)
"""Files and keys of the longest text. sentence-transformers once named the first one by the model's kind, and writes only the last
one since 5.4."""
_MAX_TOKENS: Final = 1 << 27
"""Longest text that is a limit: transformers writes 1e30 for none."""


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """Reduction from token vectors to one vector per text."""

    pooling: Pooling | None
    """None: the file lists none, as for cross-encoders."""
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
    return SentenceModules(pooling, normalizes, _max_tokens(directory))


def _folder(path: Path, module: Mapping[str, Any]) -> str:
    folder = module.get("path")
    if not isinstance(folder, str) or "/" in folder or "\\" in folder or folder.startswith("."):
        raise CheckpointError(f"{path}: path: expected the name of a folder beside it, found {shown(str(folder))}")
    return folder


def _pooling(path: Path) -> Pooling:
    config = read_object(path)
    if _MODE in config:
        mode = config[_MODE]
        name = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
        if not isinstance(name, str) or name not in _MODES:
            raise CheckpointError(f"{path}: {_MODE}: expected one of {', '.join(_MODES)}, found {shown(str(mode))}")
        return _MODES[name]
    switches = [key for key, value in config.items() if key.startswith(f"{_MODE}_") and value is True]
    if len(switches) != 1 or switches[0] not in _SWITCHES:
        found = ", ".join(map(shown, switches)) or "none"
        raise CheckpointError(f"{path}: expected one of {', '.join(_SWITCHES)} to be true, found {found}")
    return _SWITCHES[switches[0]]


def _max_tokens(directory: Path) -> int | None:
    for name, key in _LENGTHS:
        path = directory / name
        value = read_object(path).get(key) if path.is_file() else None
        if isinstance(value, int | float) and value > _MAX_TOKENS:
            return None
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"{path}: {key}: expected an integer from 1, found {value!r}")
        if value is not None:
            return value
    return None
