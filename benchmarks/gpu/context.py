"""Input of a part: sizes, seed, time limit, and the bounds that the first part measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.gpu.records import Recorder
from jaxserve.config import AttentionBackend
from jaxserve.tools.planning.devices import Rates

Platform = Literal["cuda", "cpu"]
MEASURED = "measured in the same run"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Highest rates of the device, measured in the same run; one that was not measured is its data sheet's."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written."""
    matmul_flops: float
    copy_source: str = MEASURED
    matmul_source: str = MEASURED

    @property
    def rates(self) -> Rates:
        """Return the rates in the planner's form."""
        return Rates.alike(self.copy_bytes_per_s, self.matmul_flops, self.label)

    @property
    def label(self) -> str:
        """Return both rates and where they are from."""
        copy = f"copy {self.copy_bytes_per_s / 1e9:,.0f} GB/s ({self.copy_source})"
        return f"{copy}, matmul {self.matmul_flops / 1e12:,.0f} TFLOP/s ({self.matmul_source})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One part's orders."""

    platform: Platform
    is_quick: bool
    """Tiny sizes: shows that everything runs, measures nothing of interest."""
    seed: int
    bounds: Bounds | None
    """None: neither measured nor on a data sheet, so nothing is set against them."""
    attention_backend: AttentionBackend
    """Value of the server's option: the kernels that are checked and measured with the reference."""
    folder: Path
    """Directory for temporary files."""
    results: Path
    """For files that belong to the results."""
    recorder: Recorder
    is_restarted: bool = False
    """True if an earlier process of this part ended too early: then nothing is done side by side, to find the cause."""

    def share_of_copy(self, num_bytes: float, seconds: float) -> float | None:
        """Return the fraction of the copy bandwidth that moving `num_bytes` in `seconds` reaches."""
        return None if self.bounds is None else num_bytes / seconds / self.bounds.copy_bytes_per_s

    def share_of_matmul(self, flops: float, seconds: float) -> float | None:
        return None if self.bounds is None else flops / seconds / self.bounds.matmul_flops
