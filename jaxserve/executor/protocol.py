"""The interface between the engine and the executors that run its plans."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.tiers.device import PageDevice
from jaxserve.scheduler.plan import Buckets

Progress = Callable[[str, int, int, str], None]
"""Reports the progress of a start: called with (phase, units done, units in all, detail), from any thread."""

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)


class BrokenExecutorError(Exception):
    """The executor cannot run any further step: the engine must end, and be started again."""


class Pending(Protocol[ResultT_co]):
    """A step under way."""

    def is_done(self) -> bool:
        """Return True if `result` would return at once. Never blocks."""
        ...

    def next_tokens(self) -> np.ndarray | None:
        """Block until the next of several decode steps has its tokens, int32 [B]; None if they come with the result.

        Call it for the oldest step whose result was not read.
        """
        ...

    def result(self) -> ResultT_co:
        """Block until the step is done. Raises the error of the step, or that an earlier step failed."""
        ...


class WeightStore(Protocol):
    """The weights of an executor, which can be replaced between two steps. Shapes and programs stay as they are.

    `load`, `restore` and `discard` read or copy in any thread, while steps run, and return the function that makes the change;
    it is called between two steps. So is `keep_adapters`.
    """

    def load(self, model: str) -> Callable[[], None]:
        """Read the weights of a folder, a GGUF file or a hub id. Raises StartupError or RequestError in one line."""
        ...

    def load_tensors(self, file: str) -> Callable[[], None]:
        """Read tensors of a safetensors file, which replace those of the same names. Raises StartupError or RequestError
        in one line."""
        ...

    def new_hash(self) -> str | None:
        """Return a hash of every byte of the files that the last call of `load` or `load_tensors` has read; None if they have changed
        since it began."""
        ...

    def start_hash(self) -> str | None:
        """Return the hash of the weights that the executor started with, as `new_hash` does; None if their files have changed."""
        ...

    def load_adapter(self, place: int, name: str, source: str) -> Callable[[], None]:
        """Read a LoRA adapter for a place, from 1. Its files are not read again. Raises StartupError or RequestError in one line."""
        ...

    def keep_adapters(self, places: Set[int]) -> None:
        """Forget the adapters of all other places."""
        ...

    def discard(self, *, keeps_copy: bool) -> Callable[[], None]:
        """Give the memory of the weights and of the state back. keeps_copy: copy the weights to host memory first."""
        ...

    def restore(self) -> Callable[[], bool]:
        """Bring back what `discard` has given up, with empty state; without a copy, weights are read again from where they
        came. The function returns False if these may be other weights, since their files have changed. Raises StartupError or
        RequestError in one line."""
        ...


class Executor(Protocol[PlanT_contra, ResultT_co]):
    """Runs steps in the order of their submission; a later step sees the KV writes and the tokens of earlier ones.

    Plans are `StepPlan`s of an engine that generates and `EmbedPlan`s of one that embeds. Results are read in the order
    of submission. After a failed step the executor starts anew with an empty KV pool; steps that were submitted after
    it, before its result was read, fail as well.
    """

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the end tokens of the model's configs; none if the engine embeds."""
        ...

    @property
    def buckets(self) -> Buckets: ...

    @property
    def pages(self) -> PageDevice[Any] | None:
        """Copies of pages, among the steps; None if the engine has no tiers."""
        ...

    @property
    def snapshots(self) -> PageDevice[Any] | None:
        """Copies of the slots of recurrent states, among the steps; None if the engine has no tiers, or the model no such states."""
        ...

    @property
    def weights(self) -> WeightStore | None:
        """None if the weights cannot change."""
        ...

    def submit(self, plan: PlanT_contra) -> Pending[ResultT_co]:
        """Start a step and return at once."""
        ...

    def add_stats(self, stats: EngineStats) -> None:
        """Set the fields that the executor counts: compilations, and the numbers of each host."""
        ...

    def profile(self, is_on: bool) -> None:
        """Begin or end the profile of the engine's other hosts, in the order of the steps."""
        ...

    def close(self) -> None:
        """Release the devices."""
        ...
