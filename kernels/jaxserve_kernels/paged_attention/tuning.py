"""Block sizes of the kernels per kind of device, kept as data in `tuning/<device>.json`.

Sizes of tiles depend on the head dimension and on the bytes of a number in the pool: "128/2" is bfloat16 with 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve_kernels import tuned_sizes


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Block sizes of decode attention on GPUs."""

    programs: int
    """Most thread blocks: as many as there are multiprocessors."""
    min_split: int
    """Fewest keys of a part that a row is split into."""
    waves: int
    """Parts that each worker gets, about, when all rows are alike: they are split no further."""
    long_split: int
    """Fewest keys of a part of a row that is split because it is longer than others."""
    long_parts: int
    """Parts of all rows together that such rows may add."""
    tile: int
    """Keys of one step of a worker: a multiple of the page size, or a fraction of it."""
    stages: int
    """Tiles in flight per worker."""


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Block sizes of attention of query segments on GPUs. Fields as in `DecodeTuning`."""

    programs: int
    tile: int
    stages: int


def decode_tuning(device: str, dim: int, itemsize: int) -> DecodeTuning:
    """Sizes for one head dimension and number of bytes. Raises KeyError for a combination that has no kernel."""
    return DecodeTuning(**_sizes(device, "decode", dim, itemsize))


def prefill_tuning(device: str, dim: int, itemsize: int) -> PrefillTuning:
    """Sizes for one head dimension and number of bytes. Raises KeyError for a combination that has no kernel."""
    return PrefillTuning(**_sizes(device, "prefill", dim, itemsize))


def _sizes(device: str, kernel: str, dim: int, itemsize: int) -> dict[str, Any]:
    sizes = dict(load(device)[kernel])
    tiles: dict[str, int] = sizes.pop("tiles")[f"{dim}/{itemsize}"]
    return sizes | tiles


def load(device: str) -> dict[str, Any]:
    """Return the sizes that are known for a device. Raises FileNotFoundError."""
    return tuned_sizes.load(__package__, device)
