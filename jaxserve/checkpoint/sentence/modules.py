"""Stages of a text after the model, read from the files that sentence-transformers saves beside a checkpoint.

modules.json lists them: a pooling, perhaps dense layers and a normalisation. Without it, the server's settings decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import read_object, read_objects
from jaxserve.checkpoint.sentence.folders import MODULES, module_folder, module_kind, modules_directory
from jaxserve.checkpoint.sentence.texts import TextSettings, read_text_settings
from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.embedding_head import HeadActivation, HeadLayer
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
_ACTIVATIONS: Final[Mapping[str, HeadActivation]] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Our names of activations by those of torch's classes."""
_KINDS: Final = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
_DENSE_INPUT: Final = "sentence_embedding"
_MAX_WIDTH: Final = 1 << 17
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
    dense: tuple[HeadLayer, ...] = ()
    """Layers after the pooling."""
    logit_tokens: tuple[int, ...] = ()
    """Tokens whose logits after a text make its score: that of a match, and perhaps that of none, which is subtracted."""
    texts: TextSettings = TextSettings()


def read_sentence_modules(directory: Path) -> SentenceModules | None:
    """Read the modules of the model in `directory`; None without modules.json. Raises CheckpointError for an unsupported module."""
    base = modules_directory(directory)
    if base is None:
        return None
    path = base / MODULES
    pooling: Pooling | None = None
    dense: list[HeadLayer] = []
    normalizes, reads_prompts = False, True
    logit_tokens: tuple[int, ...] = ()
    for module in read_objects(path):
        kind = module_kind(module)
        if kind == "Pooling":
            settings = base / module_folder(path, module) / "config.json"
            pooling, reads_prompts = _pooling(settings), read_object(settings).get("include_prompt") is not False
        elif kind == "Dense" and pooling is not None and not normalizes:
            dense.append(_dense(base, module_folder(path, module)))
        elif kind == "Dense":
            raise CheckpointError(f"{path}: a Dense module must come after Pooling and before Normalize")
        elif kind == "Normalize":
            normalizes = True
        elif kind == "LogitScore":
            logit_tokens = _logit_tokens(base / module_folder(path, module) / "config.json")
        elif kind != "Transformer":
            names = ", ".join(_KINDS)
            raise CheckpointError(f"{path}: module {shown(kind)}: supported: {names}")
    texts = read_text_settings(base, directory)
    if not reads_prompts:  # pooling would have to leave out their tokens
        if texts.prompts.get(texts.default_prompt or ""):
            raise CheckpointError(
                f"{path}: a default prompt, which its pooling leaves out (include_prompt), is not supported"
            )
        texts = replace(texts, prompts={}, default_prompt=None)
    return SentenceModules(pooling, normalizes, _max_tokens(directory), tuple(dense), logit_tokens, texts)


def _logit_tokens(path: Path) -> tuple[int, ...]:
    """Return the token of a match and, if there is one, that of none."""
    config = read_object(path)
    ids = [config.get("true_token_id"), config.get("false_token_id")]
    tokens = [each for each in ids if type(each) is int and 0 <= each <= _MAX_TOKENS]
    if tokens != ids[: 1 if ids[1] is None else 2]:
        raise CheckpointError(
            f"{path}: true_token_id and false_token_id: expected ids of tokens, found {shown(str(ids))}"
        )
    return tuple(tokens)


def _dense(directory: Path, folder: str) -> HeadLayer:
    path = directory / folder / "config.json"
    config = read_object(path)
    sizes: list[Any] = [config.get(key) for key in ("in_features", "out_features")]
    if not all(type(size) is int and 1 <= size <= _MAX_WIDTH for size in sizes):
        raise CheckpointError(f"{path}: in_features and out_features: expected integers from 1 to {_MAX_WIDTH}")
    names = [config.get(key) or _DENSE_INPUT for key in ("module_input_name", "module_output_name")]
    if names != [_DENSE_INPUT] * 2:
        raise CheckpointError(
            f"{path}: module_input_name and module_output_name: expected {_DENSE_INPUT}, found {shown(str(names))}"
        )
    if config.get("use_residual", False) is not False:
        raise CheckpointError(f"{path}: use_residual: expected false, found {shown(str(config['use_residual']))}")
    has_bias = config.get("bias", True)
    if not isinstance(has_bias, bool):
        raise CheckpointError(f"{path}: bias: expected true or false, found {shown(str(has_bias))}")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{path}: activation_function: expected one of {', '.join(_ACTIVATIONS)}, found {shown(name)}"
        )
    in_dim, out_dim = sizes
    return HeadLayer(f"{folder}/linear", in_dim, out_dim, has_bias=has_bias, activation=_ACTIVATIONS[name])


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
