"""Runs the real scheduler over a record and compares its plans, without devices, threads and clocks.

state      a scheduler is made from the record's settings, and its attributes are set to the captured ones
calls      each call is repeated with the recorded arguments; what the record does not have is replaced:
             tokens                by whether they ended the request
             page hashes           by names that are equal for equal pages
             grammars              by when their masks were ready, and what they allowed
             drafts                by their lengths, and how far they were right
             clock                 by its recorded readings
compared   every plan, field by field; errors; the number of readings of the clock
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from jaxserve.flight.dump import plan_data
from jaxserve.flight.errors import RecordError
from jaxserve.flight.graph import GraphReader
from jaxserve.flight.record import EngineShape, FlightRecord, RecordedCall
from jaxserve.flight.recorder import KeptPlan, pages_of, plan_fields
from jaxserve.ipc.messages import AddRequest, ErrorInfo, Grammar
from jaxserve.kv.block_table import BlockTable, HashChain, WindowTable
from jaxserve.kv.groups import SideGroups
from jaxserve.kv.manager import KVManager
from jaxserve.sampling.params import PADDING_ROW, EngineSamplingParams
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, Buckets, PromptScores, StepPlan, StepResult, StepTokens
from jaxserve.scheduler.prompt_lookup import DraftState
from jaxserve.scheduler.request import Request
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import MAX_TOP_LOGPROBS, BlockHash, RequestId

_ERROR: Final = ErrorInfo("InternalError", "replayed")
_GRAMMAR: Final = Grammar("regex", "")
_SPARE_TOKENS: Final = 128


@dataclass(frozen=True, slots=True)
class Difference:
    """The first call that the scheduler answered otherwise than in the record."""

    step: int
    """Number of the step that it belongs to: the last one that was planned, or the one that differs."""
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}: recorded {_short(self.recorded)}, replayed {_short(self.replayed)}"


def replay(record: FlightRecord) -> Difference | None:
    """Return the first difference; None if every plan is equal. Raises RecordError."""
    return _Replay(record).run()


class _Script:
    """Stands in for tokens, grammars and the clock during one call."""

    def __init__(self) -> None:
        self.times: deque[float] = deque()
        self.num_missing_times = 0
        self.ready: frozenset[str] = frozenset()
        self.jumped: dict[str, list[int]] = {}
        self.terminated: frozenset[str] = frozenset()
        self.failed: frozenset[str] = frozenset()
        self.drafts: dict[str, list[int]] = {}
        self.request_id = RequestId("")
        self.pages: list[bytes] = []
        """The request that is being added, and the names of its pages."""

    def begin(self, call: RecordedCall) -> None:
        self.times, self.num_missing_times = deque(call.times), 0
        polled = call.value if call.kind == "poll_grammars" else {}
        self.ready, self.terminated, self.failed = (
            frozenset(polled.get(name, ())) for name in ("ready", "terminated", "failed")
        )
        self.jumped = dict(polled.get("jumped", ()))
        plan = call.value["plan"] if call.kind == "schedule" else None
        self.drafts = {}
        if plan is not None:
            for key, slot, token in zip(plan["request_ids"], plan["slots"], plan["drafts"], strict=False):
                if slot < 0:
                    self.drafts.setdefault(key, []).append(token)
            for key, length in zip(plan["request_ids"], plan["draft_lengths"] or (), strict=False):
                self.drafts[key] = [0] * length

    def clock(self) -> float:
        if self.times:
            return self.times.popleft()
        self.num_missing_times += 1
        return 0.0


class _ScriptedGrammar:
    """The grammar of a request, as far as the record tells."""

    mask = np.empty(0, np.int32)

    def __init__(self, script: _Script, request_id: RequestId) -> None:
        self._script = script
        self._request_id = request_id

    @property
    def is_ready(self) -> bool:
        return self._request_id in self._script.ready

    @property
    def is_terminated(self) -> bool:
        return self._request_id in self._script.terminated

    @property
    def error(self) -> str | None:
        return "recorded" if self._request_id in self._script.failed else None

    def take_jump_forward(self) -> list[int]:
        return self._script.jumped.pop(self._request_id, [])

    def advance(self, token: int) -> None: ...

    def wait(self, seconds: float) -> None: ...


class _ScriptedGrammars:
    def __init__(self, script: _Script) -> None:
        self._script = script

    def follow(
        self, grammar: Grammar, allowed_token_ids: Collection[int], *, jump_forward: bool = False
    ) -> _ScriptedGrammar:
        return _ScriptedGrammar(self._script, self._script.request_id)


class _ScriptedDrafts(DraftState):
    """The drafts of a request, as long as those of the record."""

    __slots__ = ("_request_id", "_script")

    def __init__(self, script: _Script, request_id: RequestId, like: DraftState) -> None:
        super().__init__(0)
        for name in DraftState.__slots__:
            if hasattr(like, name):  # of a record of an older version, what was not known stays as in a new request
                setattr(self, name, getattr(like, name))
        self._script, self._request_id = script, request_id

    def draft(self, tokens: np.ndarray, count: int) -> np.ndarray:
        return np.array(self._script.drafts.get(self._request_id, [])[:count], np.int32)


class _Replay:
    def __init__(self, record: FlightRecord) -> None:
        self._record = record
        self._shape = record.shape
        self._script = _Script()
        num_arrivals = sum(call.kind == "add" for call in record.calls)
        self._arriving = iter(record.chains[len(record.chains) - num_arrivals :])
        self._scheduler = make_scheduler(self._shape, self._script.clock, _ScriptedGrammars(self._script), self._chain)
        self._step = record.first_step - 1

    def run(self) -> Difference | None:
        self._restore()
        for number, call in enumerate(self._record.calls, 1):
            try:
                self._script.begin(call)
                difference = self._compare(call)
            except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
                raise RecordError(f"call {number} of it cannot be read: {error!r}") from error
            if difference is not None:
                return difference
        return None

    def _restore(self) -> None:
        reader = GraphReader(self._record.state, lambda index: self._hashes(self._record.chains[index]))
        reader.restore(self._scheduler)
        for made in reader.objects:
            if isinstance(made, BlockTable):
                _relink(made, len(self._shape.windows))
        for made in reader.objects:
            if isinstance(made, Request):
                self._complete(made)

    def _complete(self, request: Request) -> None:
        """Give a restored request what the record does not have."""
        request.sampling = EngineSamplingParams(**request.sampling)  # type: ignore[arg-type]
        request._buffer = np.zeros(request.num_tokens + _SPARE_TOKENS, np.int32)
        request.sampling_row = PADDING_ROW
        request.stop_row = np.full(MAX_STOP_TOKENS, -1, np.int32)
        request.grammar = _ScriptedGrammar(self._script, request.request_id) if request.grammar else None
        request.draft = _ScriptedDrafts(self._script, request.request_id, request.draft)

    def _chain(self, salt: str | None, adapter: int, images: Sequence[tuple[int, int, bytes]]) -> HashChain:
        """Return the page hashes of the request that is being added."""
        return self._hashes(self._script.pages)

    def _hashes(self, names: list[bytes]) -> HashChain:
        return HashChain(self._shape.block_size, None, known=[BlockHash(name) for name in names])

    def _compare(self, call: RecordedCall) -> Difference | None:
        """Repeat a call; returns what differs."""
        error, plan = None, None
        try:
            plan = self._repeat(call)
        except RecordError:
            raise
        except Exception as raised:  # the scheduler may have failed in the record as well
            error = f"{type(raised).__name__}: {raised}"
        self._step += call.kind == "schedule" and (plan is not None or call.value["plan"] is not None)
        if error != call.error:
            return Difference(self._step, f"error of {call.kind}", call.error, error)
        if call.kind == "schedule" and error is None:
            for name, recorded, replayed in _unequal(call.value["plan"], self._data(plan, call.value["plan"])):
                return Difference(self._step, name, recorded, replayed)
        num_read = len(call.times) - len(self._script.times) + self._script.num_missing_times
        if num_read != len(call.times):
            return Difference(self._step, f"readings of the clock in {call.kind}", len(call.times), num_read)
        return None

    def _repeat(self, call: RecordedCall) -> StepPlan | None:
        scheduler, value = self._scheduler, call.value
        match call.kind:
            case "add":
                self._add(value)
            case "abort":
                scheduler.abort(value["argument"])
            case "abort_all":
                scheduler.abort_all(_ERROR)
            case "reset_prefix_cache":
                scheduler.reset_prefix_cache(reset_running_requests=value["argument"])
            case "poll_grammars":
                scheduler.poll_grammars()
            case "schedule":
                scheduler.starts_requests = value["starts_requests"]
                return scheduler.schedule()
            case "update":
                plan = scheduler.in_flight[0][0]
                scheduler.update(plan, _result(plan, value))
            case "take_tokens":
                tokens = np.array(value["token_ids"], np.int32)
                scheduler.update(scheduler.in_flight[0][0], StepTokens(tokens))
            case "fail":
                scheduler.fail(scheduler.in_flight[0][0], _ERROR, may_shrink=value["argument"])
            case unknown:
                raise RecordError(f"it has an unknown call, {unknown!r}")
        return None

    def _add(self, value: Mapping[str, Any]) -> None:
        options = value["sampling"] | {"presence_penalty": 1.0 if value["needs_state"] else 0.0}
        request_id = self._script.request_id = RequestId(value["request_id"])
        self._script.pages = next(self._arriving)
        message = AddRequest(
            request_id,
            [0] * value["num_prompt_tokens"],
            EngineSamplingParams(**options),
            value["priority"],
            grammar=_GRAMMAR if value["has_grammar"] else None,
            adapter=value["adapter"],
            key_name=value["key_name"],
        )
        error = self._scheduler.add(message)
        if error is not None:
            raise ValueError(f"{request_id} is rejected: {error.message}")
        request = self._scheduler.requests[request_id]
        request.draft = _ScriptedDrafts(self._script, request_id, request.draft)

    def _data(self, plan: StepPlan | None, recorded: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return a plan as the recorded one, which says of what rows it has all pages."""
        if plan is None:
            return None
        wholes = np.array([] if recorded is None else recorded["wholes"], bool)
        wholes = np.resize(wholes, len(plan.request_ids)) if len(wholes) else np.zeros(len(plan.request_ids), bool)
        pages = pages_of(plan, self._shape.block_size, 1 + len(self._shape.windows), wholes)
        return plan_data(KeptPlan(plan_fields(plan), wholes, pages, None))


def make_scheduler(
    shape: EngineShape,
    clock: Callable[[], float],
    grammars: _ScriptedGrammars,
    chains: Callable[[str | None, int, Sequence[tuple[int, int, bytes]]], HashChain],
) -> Scheduler:
    """Return a new scheduler as the one of the record. Raises RecordError."""
    try:
        groups = SideGroups.of_sizes(
            shape.windows,
            shape.num_state_slots,
            shape.block_size,
            max(shape.mixed_buckets),
            keeps_snapshots=shape.enable_prefix_caching,
            num_ranks=shape.num_ranks,
            unit_tokens=shape.state_unit,
        )
        kv = KVManager(
            shape.num_blocks,
            shape.block_size,
            shape.max_model_len,
            enable_prefix_caching=shape.enable_prefix_caching,
            num_ranks=shape.num_ranks,
            groups=groups,
            chains=chains,
        )
        return Scheduler(
            shape.config,
            kv,
            Buckets(
                tuple(shape.decode_buckets),
                tuple(shape.mixed_buckets),
                shape.max_num_seqs,
                shape.max_decode_steps,
                shape.num_drafts,
                shape.plans_have_drafts,
            ),
            shape.max_model_len,
            frozenset(shape.eos_token_ids),
            shape.vocab_size,
            clock,
            grammars if shape.has_grammars else None,
        )
    except ValueError as error:
        raise RecordError(f"its settings make no scheduler: {error}") from error


def _relink(table: BlockTable, num_windows: int) -> None:
    """Make the window tables of a restored table parts of its row again."""
    borders: Any = table.windows
    size = len(table.row) // (1 + num_windows)
    windows = tuple(WindowTable(table.row[i * size :][:size]) for i in range(1, 1 + num_windows))
    for window, (first, end) in zip(windows, borders, strict=True):
        window.first, window.end = first, end
    table.windows = windows


def _result(plan: StepPlan, value: Mapping[str, Any]) -> StepResult:
    token_ids = np.array(value["token_ids"], np.int32)
    tops = np.zeros((token_ids.shape[1], MAX_TOP_LOGPROBS))
    scores = None
    if value["has_scores"]:
        size = int(plan.num_scheduled_tokens.sum())
        of_tokens = np.zeros((size, MAX_TOP_LOGPROBS))
        scores = PromptScores(np.zeros(size), np.ones(size, np.int32), of_tokens.astype(np.int32), of_tokens)
    zeros = np.zeros(token_ids.shape)
    is_speculative = plan.kind == "speculate"
    return StepResult(token_ids, zeros, tops.astype(np.int32), tops, value["device_seconds"], scores, is_speculative)


def _unequal(
    recorded: Mapping[str, Any] | None, replayed: Mapping[str, Any] | None
) -> Iterator[tuple[str, object, object]]:
    """Yield the fields that differ."""
    if recorded is None or replayed is None:
        if recorded is not replayed:
            yield "plan", _title(recorded), _title(replayed)
        return
    for name, value in replayed.items():
        if recorded.get(name) != value:
            yield name, recorded.get(name), value


def _title(plan: Mapping[str, Any] | None) -> str:
    return "none" if plan is None else f"{plan['kind']}/{plan['bucket']} of {len(plan['request_ids'])} rows"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."
