"""The flight record of a real engine under mixed load, and what recording costs."""

from __future__ import annotations

import random

import msgspec
import pytest

from jaxserve.flight.dump import make_record
from jaxserve.flight.record import FlightRecord
from jaxserve.flight.replay import replay
from jaxserve.ipc.messages import Abort
from tests.call_counts import CallCounts
from tests.engine.model_engine import ModelEngine, request
from tests.engine.rig import Rig, add, prompt
from tests.engine.test_grammar_rows import CountingGrammars, counting

MAX_CALLS_PER_STEP = 90
"""Calls that a recorded step makes beyond those of one that is not. They were 62 when this limit was set."""


@pytest.mark.slow
def test_a_real_engine_under_mixed_load_is_replayed(engine: ModelEngine) -> None:
    """Chunked prompts, prefix hits, preemptions, drafts, grammars with jumps, penalties, scores, aborts."""
    vocab_size = engine.executor.model_info.vocab_size
    engine.restart(
        num_blocks=9,
        num_speculative_tokens=4,
        grammars=CountingGrammars(2, vocab_size),
        recorded_steps=50,
    )
    chance, waiting = random.Random(1), []
    for number in range(40):
        text = [9] * chance.choice([0, 16, 32]) + [chance.randrange(3, 90) for _ in range(chance.randint(4, 30))]
        options = chance.choice([{}, {}, {"presence_penalty": 0.5}, {"num_prompt_logprobs": 1}])
        plain = request(f"r{number}", text, max_tokens=chance.randint(4, 40), ignore_eos=False, **options)
        repeating = request(f"r{number}", [5, 6, 7, 8] * 8, max_tokens=30)
        waiting.append([plain, plain, counting(f"r{number}", chance.randint(3, 50)), repeating][number % 4])
    num_preemptions = num_drafts = 0
    while waiting or engine.core.has_work:
        while waiting and len(engine.scheduler.requests) < 8:
            engine.core.handle(waiting.pop())
        if engine.scheduler.requests and chance.random() < 0.04:
            engine.core.handle(Abort([chance.choice(list(engine.scheduler.requests))]))
        step = engine.core.step()
        if step is not None and step.stats is not None:
            num_preemptions += step.stats.num_preemptions
            num_drafts += step.stats.spec_decode_num_drafts
    assert num_preemptions > 0
    assert num_drafts > 0
    record = make_record(engine.recorder, engine.shape, model="tiny", reason="test")
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=FlightRecord)
    assert read.first_step > 1
    assert {call.kind for call in read.calls} >= {"add", "abort", "poll_grammars", "schedule", "update"}
    assert replay(read) is None


@pytest.mark.parametrize("num_rows", [8, 64])
def test_recording_a_step_takes_a_fixed_number_of_calls(num_rows: int) -> None:
    counts = {}
    for recorded_steps in (None, 1000):
        rig = Rig(
            num_blocks=20 * num_rows,
            max_num_seqs=num_rows,
            max_num_batched_tokens=4 * num_rows,
            max_queued_requests=num_rows,
            recorded_steps=recorded_steps,
        )
        rig.send(*(add(f"r{i}", prompt(8, i), max_tokens=60) for i in range(num_rows)))
        for _ in range(10):
            rig.step()
        with (calls := CallCounts()):
            for _ in range(20):
                plan = rig.scheduler.schedule()
                assert plan is not None
                pending = rig.executor.submit(plan)
                rig.scheduler.update(plan, pending.result())
        counts[recorded_steps] = calls.total() / 20
    assert counts[1000] - counts[None] < MAX_CALLS_PER_STEP
