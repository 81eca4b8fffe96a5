"""Medians of repeated asynchronous calls. Knows no framework: who calls says how to wait."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SAMPLE_S = 0.02
"""Length of a sample: as many calls in a row, waited for once, so that the device's work covers the dispatch."""
MIN_SAMPLES = 3
MAX_SAMPLES = 25
MAX_CALLS = 200
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call."""

    median_s: float
    least_s: float
    most_s: float
    num_samples: int

    def of_one(self, num_repeats: int) -> Timing:
        """Return the times of one of the repetitions that a call makes."""
        times = (self.median_s / num_repeats, self.least_s / num_repeats, self.most_s / num_repeats)
        return Timing(*times, self.num_samples)

    @property
    def spread(self) -> str:
        """Fastest and slowest sample in the median's place of 1."""
        return f"{self.least_s / self.median_s:.2f}-{self.most_s / self.median_s:.2f}"


def time_calls(call: Callable[[], Any], wait: Callable[[Any], object], *, budget_s: float = 0.5) -> Timing:
    """Warm up, then sample for about `budget_s`. The device runs calls in order, so the last one stands for all."""
    for _ in range(WARM_UPS):
        wait(call())
    num_calls = max(1, min(MAX_CALLS, math.ceil(SAMPLE_S / max(_sample_s(call, wait, 1), 1e-6))))
    samples: list[float] = []
    started_s = time.perf_counter()
    while len(samples) < MIN_SAMPLES or (len(samples) < MAX_SAMPLES and time.perf_counter() - started_s < budget_s):
        samples.append(_sample_s(call, wait, num_calls))
    return Timing(statistics.median(samples), min(samples), max(samples), len(samples))


def _sample_s(call: Callable[[], Any], wait: Callable[[Any], object], num_calls: int) -> float:
    started_s = time.perf_counter()
    for _ in range(num_calls):
        result = call()
    wait(result)
    return (time.perf_counter() - started_s) / num_calls
