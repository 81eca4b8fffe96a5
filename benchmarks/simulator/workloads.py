"""Traces as seeded generators of sessions. Nothing is fetched; every distribution is written here.

    sharegpt   people chat: short first prompts, ShareGPT's lengths, three turns on average, no prefix in common
    agentic    programs call tools: one of 200 long instructions, popular ones more often, and ten short turns
    bursts     `sharegpt` after a prefix from 20 instructions, in waves: 5 s at 2.5 times the mean rate, 10 s at a quarter of it

Sessions arrive by a Poisson process. Every further turn arrives a random time after the reply before it has ended, so
a slow fleet is asked for less. A trace begins in steady state: besides new sessions there are those that would be between
two turns, with turns and waits of the same distributions, which have no memory. Only their earlier prompts are left out.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.simulator.trace import Session, Turn
from jaxserve.tools.bench.workload import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, Fixed, Length, LogNormal


@dataclass(frozen=True, slots=True)
class Waves:
    """Arrival rates that alternate between high and low, at the same times in the whole fleet."""

    high_s: float
    low_s: float
    high: float
    """Rate in the high phase, relative to the mean."""

    @property
    def low(self) -> float:
        """Rate in the low phase, relative to the mean."""
        return (self.high_s + self.low_s - self.high * self.high_s) / self.low_s

    def relative_rate(self, time_s: float) -> float:
        return self.high if time_s % (self.high_s + self.low_s) < self.high_s else self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Distributions of one trace."""

    name: str
    num_prefixes: int
    """Shared prefixes; number i is chosen in proportion to 1 / (i + 1)."""
    prefix: Length
    first: Length
    """Own tokens of the first prompt."""
    next: Length
    """New tokens of each further prompt."""
    output: Length
    mean_turns: float
    """Mean of the geometric distribution of a session's turns."""
    mean_wait_s: float
    """Mean of the exponential distribution of the time between a reply and the next turn."""
    waves: Waves | None = None


_SHAREGPT = Workload(
    name="sharegpt",
    num_prefixes=1,
    prefix=Fixed(0),
    first=SHAREGPT_PROMPT,
    next=LogNormal(median=60.0, sigma=1.0, least=4, most=1024),
    output=SHAREGPT_OUTPUT,
    mean_turns=3.0,
    mean_wait_s=15.0,
)
_AGENTIC = Workload(
    name="agentic",
    num_prefixes=200,
    prefix=LogNormal(median=2000.0, sigma=0.5, least=500, most=6000),
    first=LogNormal(median=150.0, sigma=0.8, least=16, most=1500),
    next=LogNormal(median=200.0, sigma=1.0, least=16, most=1500),
    output=LogNormal(median=60.0, sigma=0.8, least=8, most=400),
    mean_turns=10.0,
    mean_wait_s=2.0,
)
_BURSTS = Workload(
    name="bursts",
    num_prefixes=20,
    prefix=LogNormal(median=1000.0, sigma=0.3, least=400, most=2000),
    first=SHAREGPT_PROMPT,
    next=LogNormal(median=60.0, sigma=1.0, least=4, most=1024),
    output=SHAREGPT_OUTPUT,
    mean_turns=2.0,
    mean_wait_s=5.0,
    waves=Waves(high_s=5.0, low_s=10.0, high=2.5),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({each.name: each for each in (_SHAREGPT, _AGENTIC, _BURSTS)})


def sessions(
    workload: Workload, *, requests_per_s: float, num_requests: int, max_model_len: int, seed: int, cell: int = 0
) -> Iterator[Session]:
    """Yield sessions by arrival, until their turns are `num_requests`; a session never exceeds `max_model_len` tokens.

    Cells of one seed have the same prefixes and waves, and sessions of their own.
    """
    chance = random.Random(f"{seed}/{workload.name}/{cell}")
    prefixes = _prefixes(workload, seed)
    weights = list(itertools.accumulate(1 / (i + 1) for i in range(len(prefixes))))
    sessions_per_s = requests_per_s / workload.mean_turns
    now_s, num_left = 0.0, num_requests
    for number in itertools.count():
        if num_left <= 0:
            return
        now_s = _next_arrival_s(chance, now_s, sessions_per_s, workload)
        prefix = chance.choices(range(len(prefixes)), cum_weights=weights)[0]
        turns = _turns(chance, workload, min(num_left, _geometric(chance, workload.mean_turns)))
        turns = _fitting(turns, max_model_len - prefixes[prefix])
        num_left -= len(turns)
        key = (cell << 40) + number + workload.num_prefixes  # the first numbers are those of prefixes
        yield Session(key, now_s, prefix, prefixes[prefix], turns)


def _prefixes(workload: Workload, seed: int) -> list[int]:
    chance = random.Random(f"{seed}/{workload.name}/prefixes")
    return [workload.prefix.draw(chance) for _ in range(workload.num_prefixes)]


def _next_arrival_s(chance: random.Random, now_s: float, per_s: float, workload: Workload) -> float:
    """Return the next arrival of a Poisson process, whose rate varies: candidates of the highest rate are thinned.

    Sessions under way at the start are `mean_turns - 1` for each that arrives in `mean_wait_s`, and their next turns come
    after exponential waits.
    """
    waves, num_earlier = workload.waves, workload.mean_turns - 1
    highest = (1.0 if waves is None else waves.high) + num_earlier
    while True:
        now_s += chance.expovariate(per_s * highest)
        new = 1.0 if waves is None else waves.relative_rate(now_s)
        if chance.random() * highest < new + num_earlier * math.exp(-now_s / workload.mean_wait_s):
            return now_s


def _geometric(chance: random.Random, mean: float) -> int:
    count = 1
    while chance.random() < 1 - 1 / mean:
        count += 1
    return count


def _turns(chance: random.Random, workload: Workload, count: int) -> tuple[Turn, ...]:
    return tuple(
        Turn(
            (workload.next if i else workload.first).draw(chance),
            workload.output.draw(chance),
            chance.expovariate(1 / workload.mean_wait_s) if i else 0.0,
        )
        for i in range(count)
    )


def _fitting(turns: tuple[Turn, ...], num_tokens: int) -> tuple[Turn, ...]:
    """Return the leading turns whose tokens are at most `num_tokens` together, at least one."""
    ends = itertools.accumulate(turn.num_new_tokens + turn.num_output_tokens for turn in turns)
    return turns[: max(1, sum(end <= num_tokens for end in ends))]
