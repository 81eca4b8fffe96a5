"""Towers and preprocessing of checkpoints, and checkpoints with other configs, for tests of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.registry import open_model, read_decoder, with_vision


def vision_of(path: Path) -> VisionConfig:
    """Return the tower of a checkpoint that has one."""
    decoder, _ = read_decoder(path)
    vision = with_vision(decoder, path, open_model(path).config).vision
    assert vision is not None
    return vision


def processor_of(path: Path) -> ImageProcessorConfig:
    """Return the preprocessing of a checkpoint that has one."""
    config = read_image_processor(path)
    assert config is not None
    return config


def changed(folder: Path, model: Path, processor: Mapping[str, Any] | None = None, **keys: Any) -> Path:
    """Return a copy of a model with other values in its config and its preprocessing; those of `vision_config` and `text_config` are
    added to these tables."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    for table in ("vision_config", "text_config"):
        config[table] |= keys.pop(table, {})
    (folder / "config.json").write_text(json.dumps(config | keys))
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(processor or {})))
    return folder
