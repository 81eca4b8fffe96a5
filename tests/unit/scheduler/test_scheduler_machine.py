"""Random sequences of operations on a scheduler with a tiny pool, against its invariants.

The pool is so small that preemption, eviction and refused starts happen all the time; prompts come from
so few tokens that prefix hits happen too. Up to three steps are in flight, some of them multi-step, with drafts, or
speculative. Every finished request is compared with the direct evaluation of the fake model, with the experts of its tokens in
half of the engines; in the other half the flight record is replayed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.config import SchedulingPolicy
from jaxserve.flight.replay import replay
from jaxserve.ipc.engine_spec import Script
from jaxserve.ipc.messages import AddRequest, ErrorInfo
from jaxserve.scheduler.request import Request
from jaxserve.types import BlockId, RequestId
from tests.engine.rig import Rig, add, expected, expected_experts, expected_scores

MAX_MODEL_LEN = 40
SCRIPT = Script(cue=11, token_ids=(5, 6, 7, 5, 6, 7, 5, 6, 8, 9, 5, 6, 8, 9, 5, 6, 7, 2, 5, 6, 8, 9, 9, 9))
"""A text that repeats itself, so that some drafts are right; half of the prompts have its cue."""
ERROR = ErrorInfo("InternalError", "broken")


REQUESTS = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 9),
        "own": st.lists(st.integers(0, 100), min_size=1, max_size=6),
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0.0, 1.0]),
        "ignore_eos": st.booleans(),
        "num_prompt_logprobs": st.sampled_from([None, None, 1]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.0]),  # the fake executor counts its tokens
        "priority": st.sampled_from([0, 0, 0, -1, 1]),
        "key_name": st.sampled_from(["", "", "a", "b"]),
        "salt": st.sampled_from([None, None, "a"]),
        "returns_experts": st.booleans(),
    }
)
"""A common prefix of half of the prompts."""


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, failures and cache resets in any order, also while a step is in flight."""

    rig: Rig

    @initialize(
        num_pool_tokens=st.integers(24, 60),
        block_size=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 6),
        extra_tokens=st.integers(0, 12),
        caching=st.booleans(),
        depth=st.sampled_from([0, 1, 1, 2]),
        max_decode_steps=st.sampled_from([1, 3, 8]),
        script=st.sampled_from([None, SCRIPT]),
        num_speculative_tokens=st.sampled_from([0, 3]),
        num_drafts=st.sampled_from([0, 0, 1, 3]),
        plans_have_drafts=st.booleans(),
        scheduling_policy=st.sampled_from(["fair", "fair", "priority", "fcfs"]),
        recorded_steps=st.sampled_from([1, 3, 1000]),
        returns_experts=st.booleans(),
        shows_tokens=st.booleans(),
    )
    def build(
        self,
        num_pool_tokens: int,
        block_size: int,
        rows: int,
        extra_tokens: int,
        caching: bool,
        depth: int,
        max_decode_steps: int,
        script: Script | None,
        num_speculative_tokens: int,
        num_drafts: int,
        plans_have_drafts: bool,
        scheduling_policy: SchedulingPolicy,
        recorded_steps: int,
        returns_experts: bool,
        shows_tokens: bool,
    ) -> None:
        self.script = script
        self.rig = Rig(
            num_blocks=1 + num_pool_tokens // block_size,
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + extra_tokens,
            max_queued_requests=6,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            depth=depth,
            max_decode_steps=max_decode_steps,
            shows_tokens=shows_tokens,
            script=script,
            num_speculative_tokens=num_speculative_tokens,
            num_drafts=num_drafts,
            plans_have_drafts=plans_have_drafts and num_drafts > 0,
            num_state_slots=40 if plans_have_drafts and num_drafts > 0 else 0,
            scheduling_policy=scheduling_policy,
            recorded_steps=None if returns_experts else recorded_steps,
            returns_experts=returns_experts,
        )
        self.messages: dict[RequestId, AddRequest] = {}
        self.num_added = 0
        self.tables: dict[Request, list[BlockId]] = {}

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=6))
    def add(self, requests: list[dict[str, Any]]) -> None:
        for options in requests:
            self.num_added += 1
            prompt = [11] * options.pop("shared") + options.pop("own")
            options["returns_experts"] &= self.rig.model.model_info.routed_experts is not None
            key_name = options.pop("key_name")
            message = add(f"r{self.num_added}", prompt, seed=self.num_added, **options)
            message = msgspec.structs.replace(message, key_name=key_name)
            before = self.rig.kv.usage
            if self.rig.scheduler.add(message) is None:
                self.messages[message.request_id] = message
            assert self.rig.kv.usage == before

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.messages)))
        outputs = self.rig.scheduler.abort([request_id])
        self.rig.collect(outputs)
        assert [output.finish_reason for output in outputs] == ["abort"]
        del self.messages[request_id]
        self.check_prefix_of_expected(outputs[0].request_id)

    @rule(chance=st.integers(0, 3))
    def reset_prefix_cache(self, chance: int) -> None:
        if chance == 0:
            self.rig.scheduler.reset_prefix_cache()

    @precondition(lambda self: len(self.rig.pending) <= self.rig.depth)
    @rule()
    def schedule(self) -> None:
        is_at_rest = not self.rig.pending
        plan = self.rig.scheduler.schedule()
        if plan is not None:
            self.rig.pending.append((plan, self.rig.executor.submit(plan)))
        assert (plan is None) == (not self.messages) or not is_at_rest, "work stands still"
        running = {request.request_id for request in self.rig.scheduler.running}
        assert running <= self.planned(), "a failed step loses the KV of all that run"
        has_room = plan is not None and plan.num_tokens < self.rig.scheduler._limits.max_tokens
        if has_room and not self.rig.num_state_slots:  # with states, chunks end where a snapshot can be taken
            assert not any(self.is_in_prefill(request) for request in self.rig.scheduler.running), "budget is left"

    @staticmethod
    def is_in_prefill(request: Request) -> bool:
        """Return True if the steps in flight leave more than one token of the request to compute."""
        return request.num_tokens + request.num_unread_tokens > request.num_computed_tokens + 1

    def planned(self) -> set[RequestId]:
        return {request_id for plan, _ in self.rig.pending for request_id in plan.request_ids}

    @precondition(lambda self: self.rig.pending)
    @rule()
    def update(self) -> None:
        ended = set(self.rig.ends)
        self.rig.land()
        for request_id in set(self.rig.ends) - ended:
            self.check_reply(self.messages.pop(RequestId(request_id)))

    @precondition(lambda self: self.messages)
    @rule(num_steps=st.integers(2, 8))
    def several_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if len(self.rig.pending) <= self.rig.depth:
                self.schedule()
            if self.rig.pending:
                self.update()
            self.pages_are_conserved()
            self.tables_only_grow_while_running()
            self.no_waiting_request_has_pages()

    @precondition(lambda self: self.rig.pending)
    @rule(chance=st.integers(0, 9), may_shrink=st.booleans())
    def fail(self, chance: int, may_shrink: bool) -> None:
        if chance == 0:
            first = self.rig.pending[0][0]
            suspects = set(first.request_ids) & set(self.messages)
            outputs = self.rig.scheduler.fail(first, ERROR, may_shrink=may_shrink)
            self.rig.collect(outputs)
            self.rig.pending.clear()
            self.rig.executor.lose_state()
            assert not self.rig.scheduler.running
            assert {output.request_id for output in outputs} <= suspects
            assert len(outputs) <= 1, "only one that failed alone ends"
            for output in outputs:
                del self.messages[output.request_id]

    def check_reply(self, message: AddRequest) -> None:
        tokens = expected(message, MAX_MODEL_LEN, self.script)
        assert self.rig.tokens[message.request_id] == tokens
        assert self.rig.scores[message.request_id] == expected_scores(message)
        assert self.rig.experts[message.request_id] == expected_experts(message, tokens)

    def check_prefix_of_expected(self, request_id: RequestId) -> None:
        """No output follows a terminal one."""
        assert self.rig.ends[request_id].token_ids == []

    @invariant()
    def pages_are_conserved(self) -> None:
        pool = self.rig.kv.pool
        holders = Counter(block for request in self.holders() for block in request.table.blocks)
        for block in range(1, pool.num_usable + 1):
            assert pool.references(BlockId(block)) == holders[BlockId(block)], f"block {block}"
        assert pool.num_free == pool.num_usable - len(holders)

    @invariant()
    def tables_only_grow_while_running(self) -> None:
        current = {request: list(request.table.blocks) for request in self.rig.scheduler.running}
        for request, blocks in current.items():
            before = self.tables.get(request, [])
            assert blocks[: len(before)] == before
        self.tables = current

    @invariant()
    def no_waiting_request_has_pages(self) -> None:
        waiting = self.rig.scheduler.waiting
        assert all(request.table.num_blocks == request.num_computed_tokens == 0 for request in waiting)

    def holders(self) -> set[Request]:
        """Running requests, and aborted ones whose step is in flight."""
        in_flight = {request for _, requests in self.rig.scheduler.in_flight for request in requests}
        return {*self.rig.scheduler.running, *in_flight}

    def teardown(self) -> None:
        """All remaining requests finish, and all pages are free again."""
        if not hasattr(self, "rig"):
            return
        is_recorded = self.rig.recorder is not None
        assert not is_recorded or replay(self.rig.record()) is None, "requests under way"
        self.rig.finish(max_steps=3000)
        assert not is_recorded or replay(self.rig.record()) is None
        for message in self.messages.values():
            self.check_reply(message)
        self.rig.scheduler.reset_prefix_cache()
        assert len(self.rig.kv.pool.blank_blocks()) == self.rig.kv.pool.num_usable


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
