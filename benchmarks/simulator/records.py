"""The records of a run: one row for each request, in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NOT_YET = -1.0


@dataclass(slots=True)
class RequestColumns:
    """Requests of one cell by number, in the order of their arrival. Times in seconds."""

    arrival_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Time of the first token."""
    end_s: list[float] = field(default_factory=list)
    num_prompt_tokens: list[int] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)
    replica: list[int] = field(default_factory=list)
    is_failed: list[bool] = field(default_factory=list)

    def add(self, arrival_s: float, num_prompt_tokens: int, replica: int) -> int:
        """Add a request; returns its number."""
        self.arrival_s.append(arrival_s)
        self.first_s.append(NOT_YET)
        self.end_s.append(NOT_YET)
        self.num_prompt_tokens.append(num_prompt_tokens)
        self.num_cached_tokens.append(0)
        self.num_output_tokens.append(0)
        self.replica.append(replica)
        self.is_failed.append(False)
        return len(self.arrival_s) - 1


@dataclass(frozen=True, slots=True)
class Records:
    """Requests and replicas of one cell, or of several."""

    arrival_s: np.ndarray  # float64 [N]
    first_s: np.ndarray  # float64 [N]
    end_s: np.ndarray  # float64 [N]
    num_prompt_tokens: np.ndarray  # int32 [N]
    num_cached_tokens: np.ndarray  # int32 [N]
    num_output_tokens: np.ndarray  # int32 [N]
    replica: np.ndarray  # int32 [N]
    is_failed: np.ndarray  # bool [N]
    busy_s: np.ndarray  # float64 [R], device time of each replica
    num_steps: int
    num_calls: int
    """Calls of the scheduler: fewer than steps if steps were skipped, or one call does several."""
    num_preemptions: int
    imbalances: np.ndarray  # float64 [S], most requests of a replica over the mean, at times
    routing_s: float
    """Processor time of routing decisions."""
    cpu_s: float
    """Processor time of the run."""

    @property
    def num_replicas(self) -> int:
        return len(self.busy_s)


def frozen(columns: RequestColumns, **others: object) -> Records:
    """Return the records of a cell as arrays."""
    dtypes = {"arrival_s": float, "first_s": float, "end_s": float, "is_failed": bool}
    arrays = {
        name: np.array(getattr(columns, name), dtypes.get(name, np.int32))
        for name in RequestColumns.__dataclass_fields__
    }
    return Records(**arrays, **others)  # type: ignore[arg-type]


def joined(cells: Sequence[Records]) -> Records:
    """Return the records of several cells as one; replicas are numbered on."""
    firsts = np.cumsum([0, *(cell.num_replicas for cell in cells)])

    def stacked(name: str) -> np.ndarray:
        return np.concatenate([getattr(cell, name) for cell in cells])

    def total(values: Iterable[float]) -> float:
        return sum(values)

    return Records(
        **{name: stacked(name) for name in RequestColumns.__dataclass_fields__ if name != "replica"},
        replica=np.concatenate([cell.replica + first for cell, first in zip(cells, firsts[:-1], strict=True)]),
        busy_s=stacked("busy_s"),
        num_steps=sum(cell.num_steps for cell in cells),
        num_calls=sum(cell.num_calls for cell in cells),
        num_preemptions=sum(cell.num_preemptions for cell in cells),
        imbalances=stacked("imbalances"),
        routing_s=total(cell.routing_s for cell in cells),
        cpu_s=total(cell.cpu_s for cell in cells),
    )
