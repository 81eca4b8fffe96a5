"""Workloads of benchmarks: named mixes of prompt and output lengths.

    chat       128-token prompts, all different, 64 out
    prefix     1,056-token prompts with the first 1,024 in common, 32 out
    prefill    1,500-token prompts, all different, 16 out
    sharegpt   lengths of ShareGPT conversations: many short, few long
    custom     --input-len and --output-len

Prompts are random common words. Their length counts everything the model reads, chat template included, and
is exact (see `prompts`).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed number of tokens."""

    num_tokens: int

    def draw(self, chance: random.Random) -> int:
        del chance
        return self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal:
    """A log-normal number of tokens; values outside the limits are drawn again."""

    median: float
    """Median without the limits."""
    sigma: float
    """Standard deviation of the logarithm."""
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        while True:
            value = round(chance.lognormvariate(math.log(self.median), self.sigma))
            if self.least <= value <= self.most:
                return value


Length = Fixed | LogNormal

WorkloadName = Literal["chat", "prefix", "prefill", "sharegpt", "custom"]

# ShareGPT's means are those of 1,000 of its first turns as `vllm bench serve` reports them: 229,711 tokens in,
# 203,068 out (vllm-project/vllm, pull request 18566), cut to 4..1,024 tokens as that tool cuts them. No published
# figure fixes the spread: sigma is an assumption, the medians follow from it and the means.
SHAREGPT_PROMPT = LogNormal(median=171.0, sigma=1.4, least=4, most=1024)
SHAREGPT_OUTPUT = LogNormal(median=138.1, sigma=1.2, least=4, most=1024)

PREFIX_OWN_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Lengths of the requests."""

    name: WorkloadName
    prompt: Length
    output: Length
    num_shared_tokens: int = 0
    """Leading tokens that the prompts of a run have in common."""


PRESETS: tuple[Workload, ...] = (
    Workload(name="chat", prompt=Fixed(128), output=Fixed(64)),
    Workload(name="prefix", prompt=Fixed(1056), output=Fixed(32), num_shared_tokens=1024),
    Workload(name="prefill", prompt=Fixed(1500), output=Fixed(16)),
    Workload(name="sharegpt", prompt=SHAREGPT_PROMPT, output=SHAREGPT_OUTPUT),
    Workload(name="custom", prompt=Fixed(128), output=Fixed(64)),
)


def make_workload(
    name: WorkloadName, *, num_prompt_tokens: int | None = None, num_output_tokens: int | None = None
) -> Workload:
    """Return a preset with the given lengths; a shorter `prefix` prompt keeps 32 tokens that are not shared."""
    (workload,) = [workload for workload in PRESETS if workload.name == name]
    if num_prompt_tokens is not None:
        shared = min(workload.num_shared_tokens, max(0, num_prompt_tokens - PREFIX_OWN_TOKENS))
        workload = replace(workload, prompt=Fixed(num_prompt_tokens), num_shared_tokens=shared)
    if num_output_tokens is not None:
        workload = replace(workload, output=Fixed(num_output_tokens))
    return workload


WORDS: tuple[str, ...] = tuple(
    """time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house service
    friend father power hour game line end member law car city community name president team minute idea body
    information back parent face others level office door health person art war history party result change morning
    reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan
    college interest death experience effect use class control field development role effort rate heart drug show
    leader light voice wife police mind price report decision son view relationship town road arm difference value
    building action season society tax director position player record paper space ground form event official matter
    center couple site project activity star table need court oil situation cost industry figure street image phone
    data picture practice piece land product doctor wall patient worker news test movie north love step""".split()
)
