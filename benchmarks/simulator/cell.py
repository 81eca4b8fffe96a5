"""One router, the replicas that it routes to, and the sessions that it serves: the event loop.

Events in the order of time: requests arrive, replicas wake. A request is routed with what the router knows at that time:
replicas report outputs and pages at the end of the step that made them, later by up to `progress_s` if they skip ahead.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.simulator.records import NOT_YET, Records, RequestColumns, frozen
from benchmarks.simulator.replica import Report, SimulatedReplica
from benchmarks.simulator.step_times import StepTable
from benchmarks.simulator.trace import Conversation, Session, text_of
from jaxserve.config import SchedulerConfig
from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.kv.block_table import HashChain
from jaxserve.routing.replica import ReplicaId, Route
from jaxserve.routing.request import ReplyLengths, RouteRequest
from jaxserve.routing.router import PolicyName, Router, make_policy
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import RequestId

_UNKNOWN_LENGTH = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSettings:
    """A router and its replicas."""

    table: StepTable
    policy: PolicyName
    num_replicas: int
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_imbalance_tokens: int | None = None
    """Setting of the policy `prefix`; None: its default."""
    knows_lengths: bool = False
    """True if clients ask for as many tokens as the reply has; else they allow many, and a router expects the mean."""
    skips: bool = True
    progress_s: float = 0.25
    """Seconds by which reports of progress may be late if a replica skips ahead."""


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    number: int
    conversation: Conversation
    route: Route


class Cell:
    """Runs sessions through a router and its replicas. Deterministic: equal arguments give equal records."""

    def __init__(self, settings: CellSettings, sessions: Iterator[Session]) -> None:
        self._settings = settings
        self._sessions = sessions
        self._names = [ReplicaId(f"replica-{i:05d}") for i in range(settings.num_replicas)]
        self._numbers = {name: i for i, name in enumerate(self._names)}
        policy = make_policy(settings.policy, max_imbalance_tokens=settings.max_imbalance_tokens)
        self._router = Router(policy, self._names)
        self._block_size = settings.table.engine.block_size
        self._lengths = ReplyLengths()
        self._has_pages = settings.policy in ("prefix", "least-tokens")  # they change nothing for the others
        self._has_text = settings.policy == "text-prefix"
        self.replicas = [
            SimulatedReplica(
                settings.table,
                settings.scheduler,
                skips=settings.skips,
                progress_s=settings.progress_s,
                publishes_pages=self._has_pages,
            )
            for _ in self._names
        ]
        self._wakes: list[tuple[float, int]] = []
        self._arrivals: list[tuple[float, int, Conversation]] = []
        self._num_pushed = 0
        self._live: dict[RequestId, _Live] = {}
        self._columns = RequestColumns()
        self._imbalances: list[float] = []
        self._routing_s = 0.0

    def run(self) -> Records:
        """Run until every request has ended."""
        started_s = time.process_time()
        self._await_session()
        while True:
            arrival_s = self._arrivals[0][0] if self._arrivals else math.inf
            wake_s = self._wakes[0][0] if self._wakes else math.inf
            if arrival_s == wake_s == math.inf:
                break
            if arrival_s <= wake_s:
                self._arrive(*heapq.heappop(self._arrivals))
            else:
                self._wake(*heapq.heappop(self._wakes))
        return frozen(
            self._columns,
            busy_s=np.array([replica.device.busy_s for replica in self.replicas]),
            num_steps=sum(replica.device.num_steps for replica in self.replicas),
            num_calls=sum(replica.device.num_calls for replica in self.replicas),
            num_preemptions=sum(replica.num_preemptions for replica in self.replicas),
            imbalances=np.array(self._imbalances),
            routing_s=self._routing_s,
            cpu_s=time.process_time() - started_s,
        )

    def _await_session(self) -> None:
        """Let the next session of the trace arrive at its time."""
        session = next(self._sessions, None)
        if session is not None:
            self._push_arrival(session.arrival_s, Conversation(session, self._block_size))

    def _push_arrival(self, time_s: float, conversation: Conversation) -> None:
        heapq.heappush(self._arrivals, (time_s, self._num_pushed, conversation))
        self._num_pushed += 1

    def _arrive(self, time_s: float, number: int, conversation: Conversation) -> None:
        if conversation.num_turns == 0:
            self._await_session()
        tokens, num_output_tokens = conversation.take_prompt()
        started_s = time.thread_time()
        route = self._router.route(self._request(tokens, num_output_tokens, conversation.chain))
        self._routing_s += time.thread_time() - started_s
        index = self._numbers[route.replica.replica_id]
        number = self._columns.add(time_s, len(tokens), index)
        message = AddRequest(
            RequestId(str(number)),
            tokens.tolist(),
            EngineSamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True),
        )
        self._live[message.request_id] = _Live(number, conversation, route)
        if number % len(self.replicas) == 0:
            loads = [replica.num_requests for replica in self._router.replicas.values()]
            self._imbalances.append(max(loads) * len(loads) / sum(loads))
        self.replicas[index].submit(time_s, message, conversation.chain)
        self._push_wake(index)

    def _request(self, tokens: np.ndarray, num_output_tokens: int, chain: HashChain) -> RouteRequest:
        num_pages = (len(tokens) - 1) // self._block_size if self._has_pages else 0
        return RouteRequest(
            num_prompt_tokens=len(tokens),
            num_output_tokens=self._lengths.expected(
                num_output_tokens if self._settings.knows_lengths else _UNKNOWN_LENGTH
            ),
            pages=tuple([chain.hash(i, tokens) for i in range(num_pages)]),
            block_size=self._block_size,
            text=text_of(tokens) if self._has_text else "",
        )

    def _push_wake(self, index: int) -> None:
        wake_s = self.replicas[index].next_wake_s
        if wake_s < math.inf:
            heapq.heappush(self._wakes, (wake_s, index))

    def _wake(self, time_s: float, index: int) -> None:
        replica = self.replicas[index]
        if replica.next_wake_s != time_s:
            return  # it was planned anew since
        for report in replica.wake(time_s):
            self._take_report(index, report)
        self._push_wake(index)

    def _take_report(self, index: int, report: Report) -> None:
        if self._has_pages:
            self._router.replicas[self._names[index]].pages.change(report.published, report.evicted)
        for output in report.outputs:
            self._take_output(report.time_s, output)

    def _take_output(self, time_s: float, output: RequestOutput) -> None:
        live, columns = self._live[output.request_id], self._columns
        number = live.number
        if output.token_ids:
            if columns.first_s[number] == NOT_YET:
                columns.first_s[number] = time_s
            columns.num_output_tokens[number] += len(output.token_ids)
            columns.num_cached_tokens[number] = output.num_cached_tokens
            live.route.note_output(len(output.token_ids))
        if output.finish_reason is None:
            return
        columns.end_s[number] = time_s
        columns.is_failed[number] = output.error is not None
        del self._live[output.request_id]
        live.route.end()
        self._lengths.record(columns.num_output_tokens[number])
        if (turn := live.conversation.next_turn) is not None and output.error is None:
            self._push_arrival(time_s + turn.wait_s, live.conversation)
