"""The model to plan for: its config, and the sizes of its stored weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import read_decoder


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A decoder and the path of its config."""

    path: Path
    decoder: DecoderConfig
    stored_bytes: int | None
    """Bytes of the checkpoint's tensors; None if there is only a config."""
    stored_dtypes: tuple[str, ...]
    """Types of the tensors, the one with most bytes first."""


def read_model(path: Path) -> PlannedModel:
    """Read a GGUF file, or a directory with config.json, with or without weights; of weights only the headers.

    Raises CheckpointError with one line.
    """
    decoder, checkpoint = read_decoder(path)
    if checkpoint is None:
        return PlannedModel(path, decoder, None, ())
    by_dtype = bytes_by_dtype(checkpoint)
    return PlannedModel(path, decoder, sum(by_dtype.values()), tuple(by_dtype))


def bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the stored bytes of each type, the one with most bytes first."""
    found: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        found[info.stored_dtype] += info.num_stored_bytes
    return dict(found.most_common())
