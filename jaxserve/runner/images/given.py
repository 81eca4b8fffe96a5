"""The program that writes embeddings of prompts, which clients gave in place of tokens, to their rows on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from jaxserve.runner.images.encoder import ImageShape
from jaxserve.scheduler.plan import EmbedsItem

EMBEDS_FIELDS: Final = {
    "embedding_rows": "T",  # padding points after the last one
    "values": "T D",  # float32 by their bits
}


def batches(items: Sequence[EmbedsItem], size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield values and rows of up to `size` embeddings each, in their order."""
    if not items:
        return
    values = np.concatenate([item.values for item in items])
    rows = np.concatenate([item.rows for item in items])
    for start in range(0, len(rows), size):
        yield values[start : start + size], rows[start : start + size]


def pack_embeds(values: np.ndarray, rows: np.ndarray, shape: ImageShape, field: dict[str, np.ndarray]) -> None:
    """Fill in the fields of a packed call."""
    field["embedding_rows"][:] = shape.num_rows
    field["embedding_rows"][: len(rows)] = rows
    field["values"][: len(rows)] = values.view(np.int32)


def dummy_embeds(shape: ImageShape) -> EmbedsItem:
    """Return embeddings of no request, for the first run of the program; they go to the row of padding."""
    values = np.zeros((shape.num_given, shape.given_width), np.float32)
    return EmbedsItem(values, np.full(shape.num_given, shape.num_rows, np.int32))
