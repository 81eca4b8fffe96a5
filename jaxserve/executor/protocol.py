"""What the engine asks of whoever runs its plans."""

from __future__ import annotations

from typing import Protocol

from jaxserve.ipc.messages import ModelFacts
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult


class Pending(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Block until the step is done. Raises what the step raised."""
        ...


class Executor(Protocol):
    """Steps run in the order of their submission; a later step sees the KV writes of earlier ones."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def buckets(self) -> Buckets: ...

    def submit(self, plan: StepPlan) -> Pending:
        """Start a step and return at once."""
        ...

    def compilations(self) -> dict[str, int]:
        """Backend compilations so far by phase: `{"warmup": n, "serving": n}`."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...
