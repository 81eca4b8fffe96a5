"""Step times: of several steps at once, of mixed steps, and marked as measured or estimated."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.simulator.step_times import TABLES, ProgramTimes, decode_seconds, load_table, mixed_work
from jaxserve.config import SchedulerConfig
from jaxserve.ipc.messages import AddRequest
from jaxserve.kv.manager import KVManager
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.plan import Buckets, StepResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import RequestId


def test_several_decode_steps_take_as_long_as_one_after_the_other() -> None:
    times = ProgramTimes(0.01, 0.001, 1e-5)
    single = sum(decode_seconds(times, 3, 100 + 3 * i, 1) for i in range(7))
    assert decode_seconds(times, 3, 100, 7) == pytest.approx(single)
    assert decode_seconds(times, 3, 100, 1) == pytest.approx(0.01 + 0.003 + 0.001)


def test_work_of_a_mixed_step_is_counted_by_hand() -> None:
    """One request decodes its 5th token while 7 of another's 10 prompt tokens are computed."""
    scheduler = Scheduler(
        SchedulerConfig(), KVManager(32, 4, 64), Buckets((1, 2), (8,), 2), 64, frozenset(), vocab_size=100
    )
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    scheduler.add(AddRequest(RequestId("a"), [1, 2, 3, 4], sampling))
    plan = scheduler.schedule()
    assert plan is not None
    work = mixed_work(plan)
    assert (work.num_tokens, work.num_keys, work.num_pairs) == (4, 4, 10)
    none = np.zeros((1, 1))
    scheduler.update(plan, StepResult(np.ones((1, 1), np.int32), none, none.astype(np.int32), none, 0.0))
    scheduler.add(AddRequest(RequestId("b"), [5] * 10, sampling))
    plan = scheduler.schedule()
    assert plan is not None and plan.kind == "mixed"
    work = mixed_work(plan)
    assert (work.num_tokens, work.num_keys, work.num_pairs) == (8, 5 + 7, 28)


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_tables_have_every_program_and_say_where_they_are_from(path: object) -> None:
    table = load_table(str(path))
    names = {f"decode/{size}" for size in table.engine.decode_buckets}
    names |= {f"mixed/{size}" for size in table.engine.mixed_buckets}
    assert set(table.programs) == names
    for times in table.programs.values():
        assert times.fixed_s > 0 and min(times.per_token_s, times.per_key_s, times.per_pair_s) >= 0
    is_accelerator = any(word in table.title for word in ("TPU", "NVIDIA"))
    assert (table.source == "estimated") == is_accelerator
    assert not is_accelerator or ("estimated" in table.title and "not measured" in table.method)


def test_estimates_are_the_bounds_of_the_planner() -> None:
    """Llama 3.1 8B in bfloat16 has 15 GB to read: 13 ms at 1,640 GB/s and 70 % of them."""
    table = load_table("v6e-llama-8b")
    num_bytes = 2 * 7.5e9
    assert table.programs["decode/8"].fixed_s == pytest.approx(num_bytes / 1.64e12 / 0.7, rel=0.01)
    assert table.programs["decode/8"].per_key_s == pytest.approx(2 * 32 * 8 * 128 * 2 / 1.64e12 / 0.7, rel=1e-6)
    assert json.loads((TABLES / "v6e-llama-8b.json").read_text())["source"] == "estimated"
