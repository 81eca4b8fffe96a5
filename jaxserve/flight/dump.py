"""Turns what a recorder keeps into a record, without tokens of texts."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from jaxserve import __version__
from jaxserve.flight.capture import CapturedObject
from jaxserve.flight.graph import write_graph
from jaxserve.flight.record import FORM, EngineShape, FlightRecord, RecordedCall
from jaxserve.flight.recorder import Arrival, Event, KeptEvents, KeptPlan, KeptResult, Recorder, Scheduled
from jaxserve.kv.block_table import HashChain
from jaxserve.scheduler.plan import NO_SLOT, UNREAD_TOKEN, StepTokens

SOME_TOKEN: Final = -2
"""Stands for every token that does not end its request."""
OTHER_TOKEN: Final = -3
"""Stands for a drafted token that was wrong."""


def make_record(recorder: Recorder, shape: EngineShape, *, model: str, reason: str) -> FlightRecord:
    """Return all that `recorder` keeps. Any thread may call it while the scheduler works."""
    segments = recorder.segments
    events = [event for segment in segments for event in list(segment.events)[: segment.num_kept]]
    start = segments[0].start
    root = start.load()
    rename = _renamer()
    arrivals = [event.value for event in events if event.kind == "add"]
    chains = [*start.chains, *(arrival.chain or HashChain(shape.block_size, None) for arrival in arrivals)]
    state = write_graph(root, rename)  # before the calls: names are given in the order of use
    names = [[rename(page) for page in chain.known] for chain in chains]
    ends = _Ends(frozenset(shape.eos_token_ids), root, arrivals)
    return FlightRecord(
        form=FORM,
        version=__version__,
        model=model,
        reason=reason,
        time=time.time(),
        shape=shape,
        chains=names,
        state=state,
        first_step=segments[0].first_step,
        calls=list(_calls(events, ends, root)),
    )


def _renamer() -> Callable[[bytes], bytes]:
    key = secrets.token_bytes(32)
    return cache(lambda page: blake2b(page, digest_size=12, key=key).digest())


class _Ends:
    """The tokens that may end each request; others are replaced."""

    def __init__(self, eos_token_ids: frozenset[int], root: CapturedObject, arrivals: list[Arrival]) -> None:
        self._eos = eos_token_ids
        captured: Mapping[str, CapturedObject] = root.attributes["requests"]
        self._stops = {key: frozenset(request.attributes["stop_token_ids"]) for key, request in captured.items()}
        self._stops |= {each.request_id: frozenset(each.sampling["stop_token_ids"]) for each in arrivals}

    def token(self, request_id: str, token: int) -> int:
        is_kept = token == UNREAD_TOKEN or token in self._eos or token in self._stops.get(request_id, ())
        return token if is_kept else SOME_TOKEN

    def tokens(self, request_id: str, tokens: list[int]) -> list[int]:
        return [self.token(request_id, token) for token in tokens]


def _calls(events: list[Event], ends: _Ends, root: CapturedObject) -> Iterator[RecordedCall]:
    in_flight: deque[tuple[Any, dict[str, Any] | None, KeptPlan | None]] = deque()
    for _, requests in root.attributes["in_flight"]:
        ids = [request.attributes["request_id"] for request in requests]
        in_flight.append((ids, None, None))
    for event in events:
        match event.value:
            case Arrival() as arrival:
                value = {name: getattr(arrival, name) for name in _ARRIVAL}
            case KeptEvents() as grammars:
                jumped = [[key, ends.tokens(key, tokens)] for key, tokens in grammars.jumped]
                value = {"ready": grammars.ready, "jumped": jumped}
                value |= {"terminated": grammars.terminated, "failed": grammars.failed}
            case Scheduled() as scheduled:
                plan = None if scheduled.plan is None else plan_data(scheduled.plan)
                value = {"starts_requests": scheduled.starts_requests, "plan": plan}
                if plan is not None:
                    plan["drafts"] = [OTHER_TOKEN if slot == NO_SLOT else SOME_TOKEN for slot in plan["slots"]]
                    in_flight.append((plan["request_ids"], plan, scheduled.plan))
            case StepTokens() as taken:  # rows of padding follow
                ids = in_flight[0][0]
                tokens = [ends.token(key, token) for key, token in zip(ids, taken.token_ids.tolist(), strict=False)]
                value = {"token_ids": tokens}
            case KeptResult() as result:
                value = _result_data(result, *in_flight.popleft(), ends)
            case argument:
                value = {"argument": argument}
                if event.kind == "fail":
                    in_flight.clear()
        yield RecordedCall(event.kind, value, event.times, event.error)


_ARRIVAL: Final = (
    "request_id",
    "num_prompt_tokens",
    "sampling",
    "needs_state",
    "has_grammar",
    "priority",
    "key_name",
    "adapter",
)


def plan_data(kept: KeptPlan) -> dict[str, Any]:
    """Return a plan as it is written and compared."""
    fields = {**kept.fields, "wholes": kept.wholes, "pages": kept.pages}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, tuple) else value
        for name, value in fields.items()
    }


def _result_data(
    result: KeptResult, request_ids: list[str], plan: dict[str, Any] | None, kept: KeptPlan | None, ends: _Ends
) -> dict[str, Any]:
    """Return a result, and add to its plan which drafted tokens were right."""
    steps = [
        [ends.token(key, token) for key, token in zip(request_ids, row, strict=True)]
        for row in result.token_ids.tolist()
    ]
    if plan is not None and kept is not None and kept.token_ids is not None:
        # Row i of a request samples what the draft of row i + 1 should be.
        sampled, drafted = result.token_ids[0].tolist(), kept.token_ids.tolist()
        plan["drafts"] = [
            steps[0][row - 1] if slot == NO_SLOT and drafted[row] == sampled[row - 1] else draft
            for row, (slot, draft) in enumerate(zip(plan["slots"], plan["drafts"], strict=True))
        ]
    return {"token_ids": steps, "device_seconds": result.device_seconds, "has_scores": result.has_scores}
