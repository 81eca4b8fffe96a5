"""Compares two servers round by round: the ratio of each pair of neighbours in time, and how the ratios spread."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.load import Cell, Sample


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of the load generator."""

    key: str
    heading: str
    digits: int
    is_more_better: bool


PROMPT_THROUGHPUT = "input_throughput"
METRICS = (
    Metric("output_throughput", "output tok/s", 1, True),
    Metric(PROMPT_THROUGHPUT, "prompt tok/s", 0, True),
    Metric("median_ttft_ms", "TTFT p50 ms", 0, False),
    Metric("p99_ttft_ms", "TTFT p99 ms", 0, False),
    Metric("median_tpot_ms", "TPOT p50 ms", 1, False),
    Metric("p99_itl_ms", "ITL p99 ms", 0, False),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one cell, jaxserve against a peer: medians over the rounds, and the rounds' ratios."""

    peer: str
    cell: Cell
    metric: str
    ours: float
    theirs: float
    ratio: float
    """Median of ours / theirs."""
    least_ratio: float
    most_ratio: float
    num_rounds: int


def figure(sample: Sample, key: str) -> float | None:
    """A figure of a sample; None where no request gave one."""
    if key == PROMPT_THROUGHPUT:
        return float(sample.figures["total_input_tokens"]) / float(sample.figures["duration"])
    value = sample.figures.get(key)
    return None if value is None else float(value)


def compare(samples: Sequence[Sample], *, ours: str, peer: str) -> list[Comparison]:
    """Every metric of every cell in which both servers have figures of the same rounds.

    `samples` are those of one pairing: of either server, one sample per cell and round.
    """
    found = []
    for cell in dict.fromkeys(sample.cell for sample in samples):
        for metric in METRICS:
            pairs = list(_pairs([each for each in samples if each.cell == cell], ours, peer, metric.key))
            if pairs:
                found.append(_comparison(peer, cell, metric.key, pairs))
    return found


def _pairs(samples: Iterable[Sample], ours: str, peer: str, key: str) -> Iterable[tuple[float, float]]:
    by_round: dict[int, dict[str, float]] = {}
    for sample in samples:
        value = figure(sample, key)
        if value is not None and value > 0:
            by_round.setdefault(sample.round, {})[sample.server] = value
    for values in by_round.values():
        if ours in values and peer in values:
            yield values[ours], values[peer]


def _comparison(peer: str, cell: Cell, key: str, pairs: Sequence[tuple[float, float]]) -> Comparison:
    ratios = [ours / theirs for ours, theirs in pairs]
    return Comparison(
        peer=peer,
        cell=cell,
        metric=key,
        ours=statistics.median(ours for ours, _ in pairs),
        theirs=statistics.median(theirs for _, theirs in pairs),
        ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        most_ratio=max(ratios),
        num_rounds=len(pairs),
    )


def faults(samples: Sequence[Sample]) -> list[str]:
    """Return the reasons to doubt figures: failed requests, short outputs, different prompt counts."""
    found = []
    for sample in samples:
        place = f"{sample.server}, {sample.cell.label}, round {sample.round}"
        figures: dict[str, Any] = sample.figures
        if figures["failed"]:
            errors = "; ".join(figures["errors"])
            found.append(f"{place}: {figures['failed']} of {sample.cell.num_prompts} requests failed: {errors}"[:300])
        if figures.get("short_outputs"):
            found.append(f"{place}: {figures['short_outputs']} outputs shorter than asked for")
    for cell, round_number in dict.fromkeys((sample.cell, sample.round) for sample in samples):
        counts = {
            sample.server: sample.figures["total_input_tokens"]
            for sample in samples
            if (sample.cell, sample.round) == (cell, round_number) and not sample.figures["failed"]
        }
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{server} {count}" for server, count in counts.items())
            found.append(f"{cell.label}, round {round_number}: prompts counted differently: {listed}")
    return found
