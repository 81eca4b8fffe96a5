"""Settings of sentence-transformers for texts before the tokenizer and for scores: prompts, lower case, and the activation of scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import read_object
from jaxserve.errors import CheckpointError, shown
from jaxserve.types import LabelActivation

_FILE: Final = "config_sentence_transformers.json"
LABEL_ACTIVATIONS: Final[Mapping[str, LabelActivation]] = {"Sigmoid": "sigmoid", "Identity": "none"}
"""Activations of scores by their names in torch."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Settings of a model's texts and scores."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before a text, by name."""
    default_prompt: str | None = None
    """Name of the prompt of texts whose request names none; None: they have none."""
    is_lowered: bool = False
    """True if texts become lower case before they are tokenised."""
    activation: LabelActivation | None = None
    """Activation of scores; None: the model's config says which."""


def read_text_settings(base: Path, model: Path) -> TextSettings:
    """Read the files beside `modules.json`, which is in `base`, and beside the model. Raises CheckpointError."""
    path, own = base / _FILE, model / "sentence_bert_config.json"
    config: Mapping[str, Any] = read_object(path) if path.is_file() else {}
    is_lowered = own.is_file() and read_object(own).get("do_lower_case") is True
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise CheckpointError(f"{path}: prompts: expected a table of texts, found {shown(str(prompts))}")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{path}: default_prompt_name: expected the name of a prompt, found {shown(str(default))}"
        )
    return TextSettings(prompts, default, is_lowered, _activation(path, config.get("activation_fn")))


def _activation(path: Path, activation: object) -> LabelActivation | None:
    if activation is None:
        return None
    name = str(activation).rpartition(".")[2]
    if name not in LABEL_ACTIVATIONS:
        raise CheckpointError(
            f"{path}: activation_fn: expected one of {', '.join(LABEL_ACTIVATIONS)}, found {shown(name)}"
        )
    return LABEL_ACTIVATIONS[name]
