"""Simulates how long prompts wait under each scheduling policy: `python -m benchmarks.fairness OUT.png`.

The scheduler is the server's own. The device is a formula: a step takes a fixed time and one for each of its tokens, as
measured with SmolLM2-135M in float32 on two cores. Requests arrive at random times, with prompts of very different lengths,
and every policy gets the same ones. The simulated clock depends on nothing but the seed, so the figures can be repeated.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from jaxserve.config import SchedulerConfig, SchedulingPolicy
from jaxserve.errors import ConfigError
from jaxserve.ipc.messages import AddRequest
from jaxserve.kv.manager import KVManager
from jaxserve.runner.buckets import CPU_LIMITS, make_buckets
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.plan import StepPlan, StepResult
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.tools.bench.plot import COLOURS, DOTS_PER_INCH, SIZE_INCHES, check_plot
from jaxserve.types import MAX_TOP_LOGPROBS, RequestId

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEP_SECONDS: Final = 0.020
TOKEN_SECONDS: Final = 0.00125
PROMPT_LENGTHS: Final = {16: 0.35, 64: 0.25, 256: 0.2, 1024: 0.15, 3000: 0.05}
"""Share of the requests by tokens of their prompts."""
OUTPUT_TOKENS: Final = 64
"""Mean of a geometric distribution."""
MAX_MODEL_LEN: Final = 4096
BLOCK_SIZE: Final = 16
VOCAB_SIZE: Final = 1000
POLICIES: Final[tuple[SchedulingPolicy, ...]] = ("priority", "fair")
"""The policies that are drawn; `fcfs` is `priority` for requests without priorities."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """The load under one policy."""

    waits_s: dict[int, list[float]]
    """Times to first token by tokens of the prompt."""
    seconds: float
    num_steps: int

    def percentile(self, num_prompt_tokens: int, percent: float) -> float:
        return float(np.percentile(self.waits_s[num_prompt_tokens], percent))


def mixed_load(num_requests: int, requests_per_second: float, seed: int) -> list[Arrival]:
    """Return requests that arrive independently of each other, in order of arrival."""
    generator = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(num_requests):
        now += generator.expovariate(requests_per_second)
        (length,) = generator.choices(list(PROMPT_LENGTHS), list(PROMPT_LENGTHS.values()))
        output = 1 + int(generator.expovariate(1 / OUTPUT_TOKENS))
        arrivals.append(Arrival(now, length, min(output, MAX_MODEL_LEN - length)))
    return arrivals


def one_after_six_long_ones() -> list[Arrival]:
    """Return six prompts of 1,500 tokens, and one of 5 tokens 0.2 s later, with 4 tokens of output each."""
    return [*(Arrival(0.0, 1500, 4) for _ in range(6)), Arrival(0.2, 5, 4)]


def simulate(arrivals: Sequence[Arrival], policy: SchedulingPolicy) -> Run:
    """Serve `arrivals` with the defaults of a CPU, one step after the other."""
    now = 0.0
    limits = CPU_LIMITS
    kv = KVManager(4096, BLOCK_SIZE, MAX_MODEL_LEN, enable_prefix_caching=False)
    config = SchedulerConfig(scheduling_policy=policy, max_queued_requests=len(arrivals), max_burst_ms=0)
    buckets = make_buckets("cpu", limits.max_num_seqs, limits.max_num_batched_tokens)
    scheduler = Scheduler(config, kv, buckets, MAX_MODEL_LEN, frozenset(), VOCAB_SIZE, lambda: now)
    waits_s: dict[int, list[float]] = defaultdict(list)
    waiting: dict[RequestId, Arrival] = {}
    num_added = num_steps = 0
    while num_added < len(arrivals) or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, arrivals[num_added].at_s)
        while num_added < len(arrivals) and arrivals[num_added].at_s <= now:
            request_id = RequestId(str(num_added))
            waiting[request_id] = arrivals[num_added]
            error = scheduler.add(_message(request_id, arrivals[num_added]))
            assert error is None, error
            num_added += 1
        plan = scheduler.schedule()
        assert plan is not None, "no step is in flight"
        now += STEP_SECONDS + TOKEN_SECONDS * plan.num_tokens
        num_steps += 1
        for output in scheduler.update(plan, _result(plan)):
            arrival = waiting.pop(output.request_id, None) if output.token_ids else None
            if arrival is not None:
                waits_s[arrival.num_prompt_tokens].append(now - arrival.at_s)
    return Run(dict(waits_s), now, num_steps)


def _message(request_id: RequestId, arrival: Arrival) -> AddRequest:
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=arrival.num_output_tokens, ignore_eos=True)
    return AddRequest(request_id, [1] * arrival.num_prompt_tokens, sampling)


def _result(plan: StepPlan) -> StepResult:
    num_rows = len(plan.request_ids)
    alternatives = np.zeros((num_rows, MAX_TOP_LOGPROBS))
    return StepResult(
        np.ones((1, num_rows), np.int32),
        np.zeros((1, num_rows), np.float32),
        alternatives.astype(np.int32),
        alternatives.astype(np.float32),
        device_seconds=STEP_SECONDS,
    )


def table(runs: dict[SchedulingPolicy, Run]) -> str:
    """Return the waits as Markdown, and how long the load took."""
    lines = ["| prompt tokens | requests | " + " | ".join(f"{policy}: p50, p99 s" for policy in runs) + " |"]
    lines.append("|---" * (2 + len(runs)) + "|")
    for length in sorted(next(iter(runs.values())).waits_s):
        counts = {len(run.waits_s[length]) for run in runs.values()}
        cells = [f"{run.percentile(length, 50):.2f}, {run.percentile(length, 99):.2f}" for run in runs.values()]
        lines.append(f"| {length} | {counts.pop()} | " + " | ".join(cells) + " |")
    for policy, run in runs.items():
        lines.append(f"\n{policy}: {run.seconds:.1f} s, {run.num_steps} steps")
    return "\n".join(lines)


def draw(by_rate: dict[float, dict[SchedulingPolicy, Run]], file: Path) -> None:
    """Write a picture: p50 and p99 of the time to first token by tokens of the prompt, one panel per arrival rate."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout=ConstrainedLayoutEngine(wspace=0.06))
    panels = figure.subplots(1, len(by_rate), squeeze=False, sharey=True)[0]
    for axes, (rate, runs) in zip(panels, by_rate.items(), strict=True):
        for (policy, run), colour in zip(runs.items(), COLOURS, strict=False):
            _draw_run(axes, policy, run, colour)
        axes.set_title(f"{rate:g} requests per second")
        axes.set_xlabel("tokens of the prompt")
    panels[0].set_ylabel("time to first token, s")
    panels[0].legend(frameon=False)
    figure.suptitle("Simulated: mixed prompts, default limits of two cores")
    figure.savefig(file)


def _draw_run(axes: Axes, policy: str, run: Run, colour: str) -> None:
    lengths = sorted(run.waits_s)
    for percent, style, marker in ((99, "-", "o"), (50, "--", "s")):
        waits = [run.percentile(length, percent) for length in lengths]
        axes.plot(lengths, waits, style, marker=marker, markersize=4, color=colour, label=f"{policy}, p{percent}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.grid(visible=True, alpha=0.3)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help=".png, .svg or .pdf")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 1.3], help="requests per second")
    parser.add_argument("--requests", type=int, default=4000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    try:
        check_plot(arguments.out)
    except ConfigError as error:
        parser.error(str(error))
    runs = {policy: simulate(one_after_six_long_ones(), policy) for policy in POLICIES}
    print(f"Six prompts of 1,500 tokens, then one of 5:\n\n{table(runs)}\n")
    by_rate = {}
    for rate in arguments.rates:
        load = mixed_load(arguments.requests, rate, arguments.seed)
        by_rate[rate] = {policy: simulate(load, policy) for policy in POLICIES}
        print(f"{rate:g} requests per second:\n\n{table(by_rate[rate])}\n", flush=True)
    draw(by_rate, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
