"""The simulator against real processes: `jaxserve serve --replicas 4` on fake executors, over HTTP.

Requests follow one another, so that the speed of the machine decides nothing. Times are compared by
`python -m benchmarks.simulator validate`, with the result in docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from benchmarks.simulator.cell import Cell, CellSettings
from benchmarks.simulator.real_run import run_real
from benchmarks.simulator.step_times import uniform_table
from benchmarks.simulator.validate import NUM_REPLICAS, SHAPE, WORKLOAD
from benchmarks.simulator.workloads import sessions
from jaxserve.routing.router import PolicyName

pytestmark = [pytest.mark.slow, pytest.mark.scale]

NUM_REQUESTS, NUM_PAGES = 60, 40


@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
def test_every_request_finds_as_many_cached_tokens_as_in_real_processes(policy: PolicyName) -> None:
    """Pages are so few that they are evicted: a page lost or found elsewhere would show."""
    engine = msgspec.structs.replace(SHAPE, num_kv_blocks=NUM_PAGES)
    settings = CellSettings(
        table=uniform_table(engine, 0.001), policy=policy, num_replicas=NUM_REPLICAS, knows_lengths=True
    )
    workload = replace(WORKLOAD, mean_wait_s=1e-9)
    trace = list(
        sessions(
            workload, requests_per_s=1e-3, num_requests=NUM_REQUESTS, max_model_len=SHAPE.max_model_len // 2, seed=3
        )
    )
    simulated = Cell(settings, iter(trace)).run()
    real = run_real(settings, trace, 0.0, is_in_turn=True).records
    assert simulated.num_prompt_tokens.tolist() == real.num_prompt_tokens.tolist()
    assert simulated.num_output_tokens.tolist() == real.num_output_tokens.tolist()
    assert simulated.num_cached_tokens.tolist() == real.num_cached_tokens.tolist()
    assert 0 < simulated.num_cached_tokens.sum() < simulated.num_prompt_tokens.sum()
