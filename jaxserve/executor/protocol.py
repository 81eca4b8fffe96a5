"""What the engine asks of whoever runs its plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from jaxserve.ipc.messages import ModelInfo
from jaxserve.scheduler.embed_plan import EmbedBuckets, EmbedPlan, EmbedResult
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult

Progress = Callable[[str, int, int, str], None]
"""How far a start is: called with (phase, units done, units in all, detail), from any thread."""


class Pending(Protocol):
    """A step under way."""

    def is_done(self) -> bool:
        """Whether `result` would return at once. Never blocks."""
        ...

    def result(self) -> StepResult:
        """Block until the step is done. Raises what the step raised, or that a step before it failed."""
        ...


class Executor(Protocol):
    """Steps run in the order of their submission; a later step sees the KV writes and the tokens of earlier ones.

    Results are taken in the same order. After a failed step the executor starts anew with an empty KV pool;
    steps that were submitted behind it before its result was taken fail as well.

    A grammar needs the token of one step before it can say what the next one may sample. The place for that
    is here: a plan without sampling rows runs the forward half, and a second call, with the masks, samples
    from what it left on the device. The loop around it stays the same.
    """

    @property
    def task(self) -> Literal["generate"]: ...

    @property
    def model_info(self) -> ModelInfo: ...

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


class PendingVectors(Protocol):
    """A step of texts under way."""

    def is_done(self) -> bool:
        """Whether `result` would return at once. Never blocks."""
        ...

    def result(self) -> EmbedResult:
        """Block until the step is done. Raises what the step raised."""
        ...


class EmbeddingExecutor(Protocol):
    """Makes vectors. Steps run in the order of their submission and leave nothing behind."""

    @property
    def task(self) -> Literal["embed"]: ...

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def buckets(self) -> EmbedBuckets: ...

    def submit(self, plan: EmbedPlan) -> PendingVectors:
        """Start a step and return at once."""
        ...

    def compilations(self) -> dict[str, int]:
        """Backend compilations so far by phase: `{"warmup": n, "serving": n}`."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...
