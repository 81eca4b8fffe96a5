"""The model to plan for: its config, from whatever holds one, and what is stored of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxserve.checkpoint.json_file import read_object
from jaxserve.checkpoint.open import open_checkpoint
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.errors import CheckpointError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.registry import decoder_config

_CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A decoder and where its description was found."""

    path: Path
    decoder: DecoderConfig
    stored_bytes: int | None
    """Of the checkpoint's tensors; None where there is only a config."""
    stored_dtypes: tuple[str, ...]
    """As the file says, the one with most bytes first."""


def read_model(path: Path) -> PlannedModel:
    """A GGUF file, or a directory with config.json, with or without weights; only headers are read.

    Raises CheckpointError in one line.
    """
    if (path / _CONFIG_FILE).is_file() and not any(path.glob("*.safetensors")):
        decoder = _named(path, read_object(path / _CONFIG_FILE), _generation_config(path))
        return PlannedModel(path, decoder, None, ())
    checkpoint = open_checkpoint(path)
    decoder = _named(path, checkpoint.config, checkpoint.generation_config)
    by_dtype = _stored(checkpoint)
    return PlannedModel(path, decoder, sum(by_dtype.values()), tuple(by_dtype))


def _generation_config(directory: Path) -> dict[str, object]:
    file = directory / "generation_config.json"
    return read_object(file) if file.is_file() else {}


def _named(path: Path, config: dict[str, object], generation: dict[str, object]) -> DecoderConfig:
    """A refusal names the checkpoint."""
    try:
        return decoder_config(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _stored(checkpoint: Checkpoint) -> dict[str, int]:
    found: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        found[info.stored_dtype] = found.get(info.stored_dtype, 0) + info.num_stored_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))
