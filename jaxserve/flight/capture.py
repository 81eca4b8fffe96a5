"""Captures the state of a scheduler at a point in time, so that a replay can begin there.

A capture copies the scheduler's objects and those they own: requests, queues, pages. It holds no tokens of prompts and
replies, no clocks, no threads and no devices. It is made in C by `pickle`, into memory, and only this process reads it back:
files get plain data (`flight.graph`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from jaxserve.kv.block_pool import BlockPool
from jaxserve.kv.block_table import BlockTable, HashChain
from jaxserve.sampling.params import EngineSamplingParams, token_ids_of
from jaxserve.scheduler.plan import NO_TARGET, StepPlan
from jaxserve.scheduler.prompt_lookup import DraftState
from jaxserve.scheduler.request import Request

OWNED: Final = ("jaxserve.scheduler.", "jaxserve.kv.")
"""Packages whose objects are captured."""
_PLAIN: Final = ("builtins", "collections", "numpy")
_OMITTED: Final[dict[type, frozenset[str]]] = {
    BlockPool: frozenset({"_changes"}),
    DraftState: frozenset({"_predicted"}),
    Request: frozenset({"_buffer", "sampling_row", "stop_row"}),
    StepPlan: frozenset(
        {
            *("block_tables", "drafted_tokens", "masks", "next_token_ids", "sampling", "slot_inits", "stop_token_ids"),
            "token_ids",
        }
    ),
}
"""Attributes that hold tokens, or more than a replay needs."""


@dataclass(slots=True, eq=False)
class CapturedObject:
    """An object of the scheduler's packages: its class as `module:name`, and its attributes."""

    name: str
    attributes: dict[str, Any]


@dataclass(slots=True, eq=False)
class CapturedChain:
    """The place of a request's page hashes in `Capture.chains`."""

    index: int


@dataclass(frozen=True, slots=True)
class Capture:
    """The state of a scheduler."""

    data: bytes
    chains: list[HashChain]
    """The page hashes of its requests; they grow after the capture."""

    def load(self) -> CapturedObject:
        """Return the captured scheduler."""
        captured: CapturedObject = pickle.loads(self.data)
        return captured


def capture(scheduler: object) -> Capture:
    """Return the state of `scheduler`. Call it between two of its calls."""
    file = io.BytesIO()
    pickler = _Pickler(file, scheduler)
    pickler.dump(scheduler)
    return Capture(file.getvalue(), pickler.chains)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, root: object) -> None:
        super().__init__(file, protocol=5)
        self._root = root
        self.chains: list[HashChain] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type):
            return NotImplemented
        if isinstance(value, HashChain):
            self.chains.append(value)
            return CapturedChain, (len(self.chains) - 1,)
        if value is self._root or type(value).__module__.startswith(OWNED):
            return CapturedObject, (class_name(type(value)), dict(_attributes(value)))
        return NotImplemented


def class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def recorded_sampling(sampling: EngineSamplingParams) -> dict[str, Any]:
    """Return what the scheduler reads of a request's options, the tokens of the text left out."""
    return {
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": tuple(token_ids_of(sampling)["stop_token_ids"]),
        "num_top_logprobs": sampling.num_top_logprobs,
        "num_prompt_logprobs": sampling.num_prompt_logprobs,
    }


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    omitted = _OMITTED.get(type(value), frozenset())
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in (*slots, *getattr(value, "__dict__", ())):
        if name.startswith("__") or not hasattr(value, name):
            continue
        if name in omitted:
            yield name, None
            continue
        held = getattr(value, name)
        if isinstance(value, BlockTable) and name == "windows":  # parts of `row`
            yield name, [(window.first, window.end) for window in value.windows]
        elif isinstance(value, Request) and name in ("grammar", "sampling"):
            yield name, held is not None if name == "grammar" else recorded_sampling(held)
        elif isinstance(value, StepPlan) and name == "targets" and held is not None:
            yield name, NO_TARGET * (held == NO_TARGET)  # tokens of the prompt are 0
        elif not callable(held) and type(held).__module__.startswith((*_PLAIN, *OWNED)):
            yield name, held
