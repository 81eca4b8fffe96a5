"""Input of a part: sizes, seed, time limit, and the bounds that the first part measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.gpu.records import Recorder
from jaxserve.config import AttentionBackend
from jaxserve.tools.planning.devices import Rates

Platform = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Highest rates of the device, measured in the same run."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written."""
    matmul_flops: float

    @property
    def rates(self) -> Rates:
        """Return the rates in the planner's form."""
        return Rates.alike(self.copy_bytes_per_s, self.matmul_flops, "measured in the same run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One part's orders."""

    platform: Platform
    is_quick: bool
    """Tiny sizes: shows that everything runs, measures nothing of interest."""
    seed: int
    bounds: Bounds | None
    """None: they were not measured, so nothing is set against them."""
    attention_backend: AttentionBackend
    """Value of the server's option: the kernels that are checked and measured with the reference."""
    folder: Path
    """Directory for temporary files."""
    results: Path
    """For files that belong to the results."""
    recorder: Recorder

    def share_of_copy(self, num_bytes: float, seconds: float) -> float | None:
        """Return the fraction of the copy bandwidth that moving `num_bytes` in `seconds` reaches."""
        return None if self.bounds is None else num_bytes / seconds / self.bounds.copy_bytes_per_s

    def share_of_matmul(self, flops: float, seconds: float) -> float | None:
        return None if self.bounds is None else flops / seconds / self.bounds.matmul_flops
