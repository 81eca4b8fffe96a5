"""The model to plan for: its config, from whatever holds one, and what is stored of its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_decoder


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
    decoder, checkpoint = read_decoder(path)
    if checkpoint is None:
        return PlannedModel(path, decoder, None, ())
    by_dtype = bytes_by_dtype(checkpoint)
    return PlannedModel(path, decoder, sum(by_dtype.values()), tuple(by_dtype))


def bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    """Stored bytes of each type, the one with most bytes first."""
    found: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        found[info.stored_dtype] += info.num_stored_bytes
    return dict(found.most_common())
