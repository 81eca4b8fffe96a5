"""Whether an engine generates or embeds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.config import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.registry import model_of


def resolve_task(config: ModelConfig, path: Path) -> Literal["generate", "embed"]:
    """What is asked for, or what the model at `path` can do. Raises StartupError when it cannot what is asked for."""
    task = _task(config, path)
    if task == "embed" and config.adapters:
        raise ConfigError("--lora-modules: adapters of models that embed are not served")
    return task


def _task(config: ModelConfig, path: Path) -> Literal["generate", "embed"]:
    if config.task == "embed":
        return "embed"
    is_encoder = isinstance(model_of(open_checkpoint(path)), EncoderConfig)
    if config.task == "generate" and is_encoder:
        raise ConfigError("--task generate: this model is an encoder: it makes vectors, no text; use embed or auto")
    if not is_encoder:
        config.check_generates()
    return "embed" if is_encoder else "generate"
