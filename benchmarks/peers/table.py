"""The results as Markdown, ready for `docs/benchmarks/`."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.bounds import MachineBounds, output_bound, step_bound_s
from benchmarks.peers.load import Sample
from benchmarks.peers.ratios import METRICS, Comparison, Metric, compare, faults
from benchmarks.peers.rounds import Pairing, Start
from jaxserve.tools.markdown import markdown_table
from jaxserve.tools.planning.sizes import Sizes

OTHERS_LIMIT = 0.1
"""Cores taken by strangers from which a cell's figures deserve a warning."""


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """A row per cell and peer, the peers of a cell together; a column per metric: ours / theirs = ratio and range."""
    rows = []
    cells = list(dict.fromkeys(each.cell for each in comparisons))
    places = dict.fromkeys((each.cell, each.peer) for each in comparisons)
    for cell, peer in sorted(places, key=lambda place: cells.index(place[0])):
        by_metric = {each.metric: each for each in comparisons if (each.cell, each.peer) == (cell, peer)}
        columns = [_compared(by_metric.get(metric.key), metric) for metric in METRICS]
        rows.append([cell.label, peer, *columns])
    return markdown_table(("workload x streams", "peer", *(metric.heading for metric in METRICS)), rows)


def _compared(found: Comparison | None, metric: Metric) -> str:
    if found is None:
        return "-"
    ratio = f"{found.ratio:.2f}x"
    if found.num_rounds > 1:
        ratio += f" ({found.least_ratio:.2f}-{found.most_ratio:.2f})"
    if (found.ratio > 1) == metric.is_more_better:
        ratio = f"**{ratio}**"
    return f"{found.ours:.{metric.digits}f} / {found.theirs:.{metric.digits}f} = {ratio}"


def bounds_table(samples: Sequence[Sample], *, ours: str, sizes: Sizes, bounds: MachineBounds) -> str:
    """Return the fraction of the machine's bound that jaxserve reaches, cell by cell."""
    head = ("workload x streams", "output tok/s", "bound", "share", "decode step ms (TPOT p50)", "bound", "share")
    rows = []
    for cell in dict.fromkeys(sample.cell for sample in samples):
        mine = [sample.figures for sample in samples if sample.cell == cell and sample.server == ours]
        done = [figures for figures in mine if figures["completed"] and figures.get("median_tpot_ms")]
        if not done:
            continue
        rate = statistics.median(figures["output_throughput"] for figures in done)
        step_ms = statistics.median(figures["median_tpot_ms"] for figures in done)
        num_requests = sum(figures["completed"] for figures in done)
        computed = sum(figures["total_input_tokens"] - figures["total_cached_tokens"] for figures in done)
        most = output_bound(
            sizes,
            bounds,
            num_streams=cell.concurrency,
            num_prompt_tokens=computed / num_requests,
            num_output_tokens=sum(figures["total_output_tokens"] for figures in done) / num_requests,
        )
        least_ms = 1000 * step_bound_s(sizes, bounds, cell.concurrency)
        speed = (f"{rate:.1f}", f"{most:.1f}", f"{rate / most:.0%}")
        rows.append([cell.label, *speed, f"{step_ms:.1f}", f"{least_ms:.1f}", f"{least_ms / step_ms:.0%}"])
    return markdown_table(head, rows)


def server_table(pairings: Sequence[Pairing]) -> str:
    """Start-up and memory; jaxserve once per pairing, since it is started for each."""
    head = ("server", "beside", "ready s", "first reply s", "PSS MiB at start", "most", "idle cores", "others' cores")
    rows = []
    for pairing in pairings:
        for start in pairing.starts:
            own = [sample for sample in pairing.samples if sample.server == start.server]
            waiting = [sample.cores.idle_servers for sample in pairing.samples if sample.server != start.server]
            others = [sample.cores.others for sample in own]
            beside = next(each.server for each in pairing.starts if each.server != start.server)
            most_mib = max((sample.pss_mib for sample in own), default=start.pss_mib)
            times = (f"{start.ready_s:.1f}", f"{start.first_reply_s:.1f}")
            memory = (f"{start.pss_mib:.0f}", f"{most_mib:.0f}")
            rows.append([start.server, beside, *times, *memory, _span(waiting), _span(others)])
    return markdown_table(head, rows)


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}" if values else "-"


def command_lines(starts: Sequence[Start]) -> str:
    """Every server's command once."""
    lines = {}
    for start in starts:
        words = [*(f"{name}={value}" for name, value in sorted(start.environment.items())), *start.command]
        lines[start.server] = shlex.join(words)
    return "\n".join(f"{server}: {line}" for server, line in lines.items())


def hide_folders(text: str, names: Mapping[Path, str]) -> str:
    """`text` with a name instead of each folder of this machine; a folder inside another must come before it."""
    for folder, name in names.items():
        text = text.replace(str(folder), name)
    return text


def report(
    *,
    machine: Mapping[str, object],
    versions: Mapping[str, Mapping[str, str]],
    pairings: Sequence[Pairing],
    skipped: Mapping[str, str],
    bounds: MachineBounds,
    sizes: Sizes,
    ours: str,
) -> str:
    """The whole page."""
    comparisons = [each for pairing in pairings for each in compare(pairing.samples, ours=ours, peer=pairing.peer)]
    samples = [sample for pairing in pairings for sample in pairing.samples]
    starts = [start for pairing in pairings for start in pairing.starts]
    most_rounds = max((each.num_rounds for each in comparisons), default=0)
    parts = [
        f"Machine: {_listed(machine)}.",
        f"Medians of {most_rounds} rounds, jaxserve / peer = median of the rounds' ratios (least-most); "
        "bold where jaxserve is ahead.",
        comparison_table(comparisons),
        f"The machine reads {bounds.read_bytes_per_s / 1e9:.1f} GB/s and multiplies {bounds.gemm_flops / 1e9:.0f} "
        f"GFLOP/s; the weights are {sizes.read_bytes / 1e6:.0f} MB in float32.",
        bounds_table(samples, ours=ours, sizes=sizes, bounds=bounds),
        server_table(pairings),
        markdown_table(("server", "versions"), [(name, _listed(each)) for name, each in versions.items()]),
        "```text\n" + command_lines(starts) + "\n```",
    ]
    if notes := _notes(pairings, skipped, samples):
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _listed(versions: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _notes(pairings: Sequence[Pairing], skipped: Mapping[str, str], samples: Sequence[Sample]) -> list[str]:
    notes = [f"{label} was skipped: {why}" for label, why in skipped.items()]
    notes += [f"{pairing.peer} is incomplete: {pairing.problem}" for pairing in pairings if pairing.problem]
    for pairing in pairings:
        notes += faults(pairing.samples)
    crowded = sum(sample.cores.others > OTHERS_LIMIT for sample in samples)
    if crowded:
        notes.append(f"In {crowded} of {len(samples)} cells other programs took more than {OTHERS_LIMIT} cores.")
    return notes
