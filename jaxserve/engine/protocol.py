"""What the engine's core asks of a scheduler and an executor.

There are two pairs of them, for tokens and for vectors. Plans and results are between the two of a pair: the core
hands them through, and reads of them what stands here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from jaxserve.ipc.messages import AddRequest, ErrorInfo, RequestOutput
from jaxserve.ipc.stats import EngineStats
from jaxserve.types import ProgramKind, RequestId


class Plan(Protocol):
    """One call of a program."""

    @property
    def kind(self) -> ProgramKind: ...

    @property
    def bucket(self) -> int: ...

    @property
    def request_ids(self) -> tuple[RequestId, ...]: ...

    @property
    def num_steps(self) -> int:
        """More than one where it is a burst."""
        ...

    @property
    def num_tokens(self) -> int:
        """Of a step."""
        ...

    @property
    def num_padding_tokens(self) -> int: ...


class Result(Protocol):
    """What came of it."""

    @property
    def num_steps(self) -> int:
        """That were done."""
        ...

    @property
    def device_seconds(self) -> float: ...


class StepScheduler(Protocol):
    """Makes plans of requests, and outputs of results; see `scheduler.scheduler.Scheduler`."""

    stats: EngineStats

    @property
    def has_work(self) -> bool: ...

    def add(self, message: AddRequest) -> ErrorInfo | None: ...

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]: ...

    def abort_all(self, error: ErrorInfo) -> list[RequestOutput]: ...

    def reset_prefix_cache(self) -> None: ...

    def poll_grammars(self) -> list[RequestOutput]: ...

    def schedule(self) -> Plan | None: ...

    def update(self, plan: Any, result: Any) -> list[RequestOutput]: ...

    def fail(self, plan: Any, error: ErrorInfo) -> list[RequestOutput]: ...

    def take_stats(self) -> EngineStats: ...
