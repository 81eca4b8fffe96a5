"""A whole engine on the fake executor."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxserve.config import SchedulerConfig, SchedulingPolicy, TierConfig
from jaxserve.engine.core import EngineCore
from jaxserve.executor.fake.caches import POISON
from jaxserve.executor.fake.executor import FakeExecutor, FakePending, powers_of_two
from jaxserve.executor.fake.experts import fake_experts
from jaxserve.executor.fake.models import FakeTokens, next_token
from jaxserve.flight.dump import make_record
from jaxserve.flight.record import EngineShape, FlightRecord
from jaxserve.flight.recorded_scheduler import RecordedScheduler
from jaxserve.flight.recorder import Recorder
from jaxserve.ipc.engine_spec import Script
from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.kv.groups import SideGroups
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_changes import PageChanges
from jaxserve.kv.tiers.snapshots import Snapshots
from jaxserve.kv.tiers.tiers import KVTiers
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.constrained import Grammars
from jaxserve.scheduler.plan import Buckets, StepPlan, StepResult, StepTokens
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import RequestId

VOCAB_SIZE = 101
EOS = 2


def add(
    request_id: str,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    salt: str | None = None,
    returns_experts: bool = False,
    **sampling: object,
) -> AddRequest:
    """Return a greedy request that runs to `max_tokens`, unless options say otherwise."""
    params = EngineSamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return AddRequest(
        RequestId(request_id), list(prompt), params, priority, salt, returns_routed_experts=returns_experts
    )


def prompt(length: int, first: int = 3) -> list[int]:
    """Return `length` tokens; prompts with different `first` differ from the first token on."""
    return [(first + 7 * i) % VOCAB_SIZE for i in range(length)]


def expected(message: AddRequest, max_model_len: int = 1 << 30, script: Script | None = None) -> list[int]:
    """Return the tokens of the fake model for `message`, computed without any engine."""
    params = message.sampling
    tokens = list(message.prompt_token_ids)
    output: list[int] = []
    while len(output) < params.max_tokens and len(tokens) < max_model_len:
        scripted = None if script is None else script.next_token(tokens)
        seed = params.seed if params.temperature else None
        token = next_token(tokens, VOCAB_SIZE, seed) if scripted is None else scripted
        tokens.append(token)
        output.append(token)
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            break
    return output


def expected_scores(message: AddRequest) -> list[float]:
    """Return the fake model's log-probabilities of the prompt, if they are wanted."""
    is_asked = message.sampling.num_prompt_logprobs is not None
    return [-float(token) for token in message.prompt_token_ids[1:]] if is_asked else []


def expected_experts(message: AddRequest, output: Sequence[int]) -> bytes:
    """Return the fake model's experts of prompt and output but the last token, if they are wanted."""
    text = [*message.prompt_token_ids, *output[:-1]] if message.returns_routed_experts else []
    return b"".join(fake_experts(text[: i + 1]).tobytes() for i in range(len(text)))


class Rig:
    """Scheduler, pages, executor and core, wired; collects what each request gets."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        block_size: int = 4,
        max_num_seqs: int | None = 8,
        max_num_batched_tokens: int | None = 16,
        max_queued_requests: int = 64,
        max_model_len: int = 128,
        buckets: Buckets | None = None,
        enable_prefix_caching: bool = True,
        fail_at_steps: frozenset[int] = frozenset(),
        gate: threading.Event | None = None,
        depth: int = 0,
        max_decode_steps: int = 1,
        max_burst_ms: float = 50.0,
        num_speculative_tokens: int = 0,
        num_drafts: int = 0,
        plans_have_drafts: bool = False,
        scheduling_policy: SchedulingPolicy = "fair",
        device_seconds: float = 0.0,
        grammars: Grammars | None = None,
        script: Script | None = None,
        publishes_pages: bool = False,
        num_ranks: int = 1,
        tiers: TierConfig | None = None,
        windows: tuple[tuple[int, int], ...] = (),
        num_state_slots: int = 0,
        recorded_steps: int | None = None,
        returns_experts: bool = False,
        shows_tokens: bool = False,
    ) -> None:
        """`depth`: steps that `step` leaves in flight. `max_decode_steps`: above 1, all steps that can be are multi-step.
        `num_drafts`: tokens that a draft model drafts, or that plans bring if `plans_have_drafts`; 0: there are none. `recorded_steps`: plans of a segment of the flight
        recorder."""
        self.depth = depth
        self.max_model_len = max_model_len
        self.num_state_slots = num_state_slots
        rows, tokens = max_num_seqs or 8, max_num_batched_tokens or 16
        self.buckets = buckets or Buckets(
            powers_of_two(rows), powers_of_two(tokens), rows, max_decode_steps, num_drafts, plans_have_drafts
        )
        changes = PageChanges() if publishes_pages else None
        self.kv = KVManager(
            num_blocks,
            block_size,
            max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            changes=changes,
            num_ranks=num_ranks,
            groups=SideGroups.of_sizes(
                windows,
                num_state_slots,
                block_size,
                max(self.buckets.mixed),
                keeps_snapshots=enable_prefix_caching,
                num_ranks=num_ranks,
                unit_tokens=8,
            ),
        )
        self.model = FakeTokens(
            self.buckets,
            num_blocks,
            block_size,
            VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            script=script,
            windows=windows,
            num_state_slots=num_state_slots,
            num_ranks=num_ranks,
            returns_experts=returns_experts,
        )
        self.executor = FakeExecutor(
            self.model,
            fail_at_steps=fail_at_steps,
            device_seconds=device_seconds,
            gate=gate,
            shows_tokens=shows_tokens,
        )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queued_requests=max_queued_requests,
            max_burst_ms=max_burst_ms,
            num_speculative_tokens=num_speculative_tokens or num_drafts,
            scheduling_policy=scheduling_policy,
        )
        self.now = 0.0
        """The time of the scheduler's clock."""
        self.tiers = None
        if tiers is not None:
            states = self.model.snapshots
            snapshots = None if states is None else Snapshots(states, self.kv.groups.states)
            self.tiers = KVTiers(tiers, self.kv.pool, self.model.pages, block_size, changes, snapshots)
            self.tiers.follow(self.kv)
        self.recorder = None if recorded_steps is None else Recorder(recorded_steps, block_size, 1 + len(windows))
        parts = (config, self.kv, self.buckets, max_model_len, frozenset({EOS}), VOCAB_SIZE, lambda: self.now, grammars)
        self.scheduler = (
            Scheduler(*parts, tiers=self.tiers, routed_experts=self.model.model_info.routed_experts)
            if self.recorder is None
            else RecordedScheduler(self.recorder, *parts)
        )
        self.shape = EngineShape(
            config=config,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            num_ranks=num_ranks,
            windows=list(windows),
            num_state_slots=num_state_slots,
            state_unit=8,
            decode_buckets=list(self.buckets.decode),
            mixed_buckets=list(self.buckets.mixed),
            max_num_seqs=rows,
            max_decode_steps=self.buckets.max_decode_steps,
            eos_token_ids=[EOS],
            vocab_size=VOCAB_SIZE,
            has_grammars=grammars is not None,
            num_drafts=self.buckets.num_drafts,
        )
        self.core = EngineCore(self.scheduler, self.executor, depth=depth, page_changes=changes, tiers=self.tiers)
        self.num_shown = 0
        """Decode steps whose tokens were taken before the result of their call."""
        self.plans: list[StepPlan] = []
        self.pending: deque[tuple[StepPlan, FakePending[StepPlan, StepResult]]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.scores: dict[str, list[float]] = {}
        """Log-probabilities of prompt tokens."""
        self.experts: dict[str, bytes] = {}
        """Experts of all tokens that were computed, of requests that want them."""
        self.ends: dict[str, RequestOutput] = {}
        """Terminal messages. A second one fails the test."""

    def record(self) -> FlightRecord:
        """Return the flight record, as it would be read from a file."""
        assert self.recorder is not None
        record = make_record(self.recorder, self.shape, model="fake", reason="test")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=FlightRecord)

    def send(self, *messages: AddRequest) -> None:
        """Send requests that must be accepted."""
        for message in messages:
            assert self.core.handle(message) == []

    def step(self) -> StepPlan | None:
        """Run one step of scheduler and executor; freed pages are wiped, so that no request can use them.

        With a depth, the plan just submitted; or None, and then the oldest step in flight is read. Tokens that are shown before
        are taken, one step before the next plan is made and the others after.
        """
        if self.pending:
            self.show()
        self.collect(self.scheduler.poll_grammars())
        plan = self.scheduler.schedule()
        if plan is not None:
            if self.tiers is not None:
                self.tiers.write()
            self.plans.append(plan)
            self.pending.append((plan, self.executor.submit(plan)))
        if len(self.pending) > (0 if plan is None else self.depth):
            self.land()
        return plan

    def land(self) -> None:
        """Read the oldest step in flight."""
        while self.show():
            pass
        plan, pending = self.pending.popleft()
        self.collect(self.scheduler.update(plan, pending.result()))
        if self.tiers is not None:
            self.tiers.save()
        self.model.poison(self.kv.pool.blank_blocks())
        for pages, window in zip(self.kv.groups.windows, self.model.windows, strict=True):
            window.pool[pages.pool.blank_blocks()] = POISON

    def show(self) -> bool:
        """Take the tokens of the oldest plan's next decode step, if they are shown before its end."""
        plan, pending = self.pending[0]
        tokens = pending.next_tokens() if plan.num_steps > 1 else None
        if tokens is None:
            return False
        outputs = self.scheduler.update(plan, StepTokens(tokens))
        self.num_shown += bool(outputs)
        self.collect(outputs)
        return True

    def finish(self, max_steps: int = 2000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if self.step() is None and not self.scheduler.has_work:
                break
        assert not self.scheduler.has_work, "requests starve"
        assert self.kv.usage == 0.0, "pages are lost"
        for pages in self.kv.groups.windows:
            assert pages.pool.num_free == pages.pool.num_usable, "pages of a window are lost"
        for states in self.kv.groups.states:
            size = self.num_state_slots // self.kv.pool.num_ranks
            assert states.num_free == size - 1, "state slots are lost"

    def run(self, *messages: AddRequest) -> dict[str, list[int]]:
        self.send(*messages)
        self.finish()
        return self.tokens

    def collect(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, f"{output.request_id} ended before"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            scores = [entry.logprob for entry in output.prompt_logprobs or ()]
            self.scores.setdefault(output.request_id, []).extend(scores)
            self.experts[output.request_id] = self.experts.get(output.request_id, b"") + (output.routed_experts or b"")
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    def rows(self, plan: StepPlan | None) -> dict[str, int]:
        """Return the tokens of a plan by request."""
        assert plan is not None
        return dict(zip(plan.request_ids, np.asarray(plan.num_scheduled_tokens).tolist(), strict=True))
