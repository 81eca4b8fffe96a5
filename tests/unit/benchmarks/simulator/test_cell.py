"""A simulated cell: equal to every step of the real engine, deterministic, and no request is lost."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from benchmarks.simulator.cell import CellSettings
from benchmarks.simulator.records import NOT_YET, Records
from benchmarks.simulator.replica import SimulatedReplica
from benchmarks.simulator.step_times import EngineShape, uniform_table
from benchmarks.simulator.workloads import sessions
from jaxserve.config import SchedulerConfig
from jaxserve.ipc.messages import AddRequest
from jaxserve.routing.router import POLICY_NAMES, PolicyName
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.types import RequestId
from tests.unit.benchmarks.simulator.simulated import MAX_MODEL_LEN, QUICK, simulate, table

AMPLE, SCARCE = 2000, 150
"""Pages for every request at once; pages for so few that requests are preempted and cached pages evicted."""


def assert_same(one: Records, other: Records) -> None:
    """Compare all requests, and the device time of all replicas."""
    for name in ("arrival_s", "first_s", "end_s", "busy_s"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-9)
    for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "replica"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    assert (one.num_steps, one.num_preemptions) == (other.num_steps, other.num_preemptions)


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_blocks", [AMPLE, SCARCE])
@pytest.mark.parametrize("max_decode_steps", [1, 8])
def test_skipping_ahead_gives_what_every_step_gives(max_decode_steps: int, num_kv_blocks: int) -> None:
    settings = CellSettings(
        table=table(max_decode_steps=max_decode_steps, num_kv_blocks=num_kv_blocks),
        policy="round-robin",
        num_replicas=2,
    )
    skipping = simulate(settings, requests_per_s=3.0)
    stepping = simulate(replace(settings, skips=False), requests_per_s=3.0)
    assert_same(skipping, stepping)
    assert skipping.num_calls < stepping.num_calls
    assert (stepping.num_preemptions > 0) == (num_kv_blocks == SCARCE)


def test_long_sleeps_change_nothing_for_a_policy_that_looks_at_no_load() -> None:
    settings = CellSettings(
        table=table(max_decode_steps=8, num_kv_blocks=AMPLE), policy="round-robin", num_replicas=2, progress_s=1e9
    )
    assert_same(simulate(settings, num_requests=12), simulate(replace(settings, progress_s=0.0), num_requests=12))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_request_ends_once_with_its_tokens_and_again_for_the_same_seed(policy: PolicyName) -> None:
    settings = CellSettings(table=table(max_decode_steps=8, num_kv_blocks=AMPLE), policy=policy, num_replicas=3)
    records = simulate(settings, num_requests=15, seed=1)
    trace = sessions(QUICK, requests_per_s=5.0, num_requests=15, max_model_len=MAX_MODEL_LEN, seed=1)
    wanted = sorted(turn.num_output_tokens for session in trace for turn in session.turns)
    assert sorted(records.num_output_tokens.tolist()) == wanted
    assert not records.is_failed.any()
    assert (records.arrival_s <= records.first_s).all() and (records.first_s <= records.end_s).all()
    assert (records.first_s > NOT_YET).all()
    again = simulate(settings, num_requests=15, seed=1)
    timed = {"cpu_s", "routing_s"}
    for name in {each.name for each in fields(Records)} - timed:
        np.testing.assert_array_equal(getattr(records, name), getattr(again, name))
    assert simulate(settings, num_requests=15, seed=2).arrival_s.tolist() != records.arrival_s.tolist()


def test_rejected_requests_end_as_failed_and_their_sessions_with_them() -> None:
    settings = CellSettings(
        table=table(max_decode_steps=8, num_kv_blocks=AMPLE),
        policy="round-robin",
        num_replicas=1,
        scheduler=SchedulerConfig(max_num_seqs=1, max_queued_requests=1),
    )
    records = simulate(settings, requests_per_s=50.0, num_requests=12)
    assert 0 < records.is_failed.sum() < len(records.is_failed)
    assert (records.end_s >= records.arrival_s).all()
    assert (records.num_output_tokens[records.is_failed] == 0).all()


def test_times_of_one_request_are_those_of_its_steps() -> None:
    """Chunks of 16 tokens: two steps for 20 tokens of prompt, then one for each token."""
    engine = EngineShape(
        decode_buckets=(1, 2),
        mixed_buckets=(16,),
        max_num_seqs=2,
        max_decode_steps=1,
        num_kv_blocks=64,
        block_size=4,
        max_model_len=64,
    )
    replica = SimulatedReplica(
        uniform_table(engine, 0.1), SchedulerConfig(), skips=True, progress_s=1.0, publishes_pages=True
    )
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    replica.submit(3.0, AddRequest(RequestId("one"), list(range(20)), sampling))
    reports = []
    while replica.next_wake_s < float("inf"):
        reports += replica.wake(replica.next_wake_s)
    times_s = [report.time_s for report in reports for output in report.outputs if output.token_ids]
    assert times_s[0] == pytest.approx(3.2)
    assert times_s[-1] == pytest.approx(3.7)
    assert sum(len(output.token_ids) for report in reports for output in report.outputs) == 6
    assert sum(len(report.published) for report in reports) == 25 // 4 == 6  # the last token has no page entry


def test_page_events_tell_what_the_pool_has_cached() -> None:
    settings = CellSettings(table=table(max_decode_steps=8, num_kv_blocks=SCARCE), policy="prefix", num_replicas=1)
    pages: set[bytes] = set()
    replica = SimulatedReplica(settings.table, settings.scheduler, skips=True, progress_s=1.0, publishes_pages=True)
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for number in range(12):
        prompt = [number // 2, *range(250), *range(249)]
        replica.submit(0.1 * number, AddRequest(RequestId(str(number)), prompt, sampling))
    num_evicted = 0
    while replica.next_wake_s < float("inf"):
        for report in replica.wake(replica.next_wake_s):
            num_evicted += len(report.evicted)
            pages = (pages | set(report.published)) - set(report.evicted)
    assert num_evicted > 0
    assert len(pages) == replica.kv.pool.num_free - len(replica.kv.pool.blank_blocks())
