"""Compares simulations with real runs of the same trace: four replicas in real processes, fake executors, real HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulator.cell import Cell, CellSettings
from benchmarks.simulator.real_run import fake_shape, run_real
from benchmarks.simulator.records import Records
from benchmarks.simulator.step_times import uniform_table
from benchmarks.simulator.trace import Session
from benchmarks.simulator.workloads import Workload, sessions
from jaxserve.config import SchedulerConfig
from jaxserve.routing.router import PolicyName
from jaxserve.tools.bench.workload import LogNormal

NUM_REPLICAS = 4
STEP_S = 0.2
"""Long enough that eleven processes on two busy cores do not delay steps by much."""
NUM_SIMULATIONS = 21
MAX_DELAY_S = 0.02
"""By which sessions of the simulations arrive later than the trace says."""
SHAPE = fake_shape(max_num_seqs=8, max_num_batched_tokens=128, num_kv_blocks=260, block_size=16, max_model_len=1024)
WORKLOAD = Workload(
    name="small agentic",
    num_prefixes=12,
    prefix=LogNormal(median=200.0, sigma=0.4, least=100, most=400),
    first=LogNormal(median=40.0, sigma=0.6, least=8, most=120),
    next=LogNormal(median=30.0, sigma=0.6, least=8, most=100),
    output=LogNormal(median=16.0, sigma=0.6, least=4, most=60),
    mean_turns=4.0,
    mean_wait_s=1.0,
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of a policy, simulated and real."""

    policy: PolicyName
    name: str
    simulated: float
    real: float

    @property
    def difference(self) -> float:
        """Return the difference relative to the real value."""
        return self.simulated / self.real - 1


def compare(policies: Sequence[PolicyName], *, requests_per_s: float, num_requests: int, seed: int) -> list[Comparison]:
    """Run every policy both ways."""
    found = []
    for policy in policies:
        settings = CellSettings(
            table=uniform_table(SHAPE, STEP_S),
            policy=policy,
            num_replicas=NUM_REPLICAS,
            scheduler=SchedulerConfig(max_num_seqs=SHAPE.max_num_seqs),
            knows_lengths=True,
        )
        trace = list(
            sessions(
                WORKLOAD,
                requests_per_s=requests_per_s,
                num_requests=num_requests,
                max_model_len=SHAPE.max_model_len,
                seed=seed,
            )
        )
        run = run_real(settings, trace, STEP_S)
        simulated = {"TTFT of a lone request s": STEP_S} | simulate(settings, trace)
        real = {"TTFT of a lone request s": run.lone_ttft_s} | _figures(run.records)
        found += [Comparison(policy, name, simulated[name], real[name]) for name in simulated]
    return found


def simulate(settings: CellSettings, trace: Sequence[Session]) -> dict[str, float]:
    """Return the median of each figure over NUM_SIMULATIONS, in which sessions arrive up to MAX_DELAY_S later than in `trace`.

    Where a request goes depends on the order of arrivals and steps, and all later requests on that: figures of one run are
    samples. The longest waits of 300 requests differ by a quarter if sessions arrive some milliseconds later, as those of
    real clients do.
    """
    runs = []
    for seed in range(NUM_SIMULATIONS):
        delays = np.random.default_rng(seed).uniform(0.0, MAX_DELAY_S, len(trace)).tolist()
        late = [replace(each, arrival_s=each.arrival_s + delay) for each, delay in zip(trace, delays, strict=True)]
        late.sort(key=lambda session: session.arrival_s)
        runs.append(_figures(Cell(settings, iter(late)).run()))
    return {name: float(np.median([run[name] for run in runs])) for name in runs[0]}


def _figures(records: Records) -> dict[str, float]:
    ttft_s = records.first_s - records.arrival_s
    return {
        "requests": len(records.arrival_s),
        "hit rate": records.num_cached_tokens.sum() / records.num_prompt_tokens.sum(),
        "TTFT mean s": float(ttft_s.mean()),
        "TTFT p50 s": float(np.percentile(ttft_s, 50)),
        "TTFT p99 s": float(np.percentile(ttft_s, 99)),
        "end-to-end mean s": float((records.end_s - records.arrival_s).mean()),
        "output tokens/s": float(records.num_output_tokens.sum() / records.end_s.max()),
    }


def as_markdown(comparisons: Sequence[Comparison]) -> str:
    """Return a table."""
    lines = ["| policy | figure | simulated | real | difference |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {each.policy} | {each.name} | {each.simulated:.4g} | {each.real:.4g} | {each.difference:+.1%} |"
        for each in comparisons
    ]
    return "\n".join(lines) + "\n"
