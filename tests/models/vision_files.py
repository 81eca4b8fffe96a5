"""Towers of checkpoints, for tests of their configs."""

from __future__ import annotations

from pathlib import Path

from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.registry import open_model, read_decoder, with_vision


def vision_of(path: Path) -> VisionConfig:
    """Return the tower of a checkpoint that has one."""
    decoder, _ = read_decoder(path)
    vision = with_vision(decoder, path, open_model(path).config).vision
    assert vision is not None
    return vision
