"""The Markdown page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.peers.bounds import MachineBounds
from benchmarks.peers.load import Cell, CoreUse, Sample
from benchmarks.peers.ratios import Comparison
from benchmarks.peers.rounds import Pairing, Start
from benchmarks.peers.table import command_lines, comparison_table, hide_folders, report
from jaxserve.tools.markdown import markdown_table
from tests.unit.benchmarks.test_bounds import SHAPE

CHAT = Cell("chat", 4, 16)
SIZES = replace(SHAPE, num_layer_weights=106_000_000, num_head_weights=28_000_000, read_bytes=536_000_000)


def sample(server: str, round_number: int, rate: float, *, others: float = 0.0) -> Sample:
    figures = {
        "failed": 0,
        "completed": 16,
        "errors": {},
        "duration": 10.0,
        "total_input_tokens": 2048,
        "total_cached_tokens": 0,
        "total_output_tokens": 1024,
        "output_throughput": rate,
        "median_ttft_ms": 20000 / rate,
        "p99_ttft_ms": 30000 / rate,
        "median_tpot_ms": 4000 / rate,
        "p99_itl_ms": 5000 / rate,
    }
    cores = CoreUse(loaded_server=1.9, idle_servers=0.02, load_generator=0.1, others=others)
    return Sample(server, CHAT, round_number, figures, cores, 900.0, 1000.0)


def page(pairing: Pairing) -> str:
    return report(
        machine={"cpu": "some CPU", "cores": 2},
        versions={"jaxserve": {"jax": "1"}, "peer": {"peer": "2"}},
        pairings=[pairing],
        skipped={"other": "no compiler"},
        bounds=MachineBounds(30e9, 120e9),
        sizes=SIZES,
        ours="jaxserve",
    )


def pairing(*, others: float = 0.0) -> Pairing:
    rates = [("jaxserve", 0, 90.0), ("peer", 0, 60.0), ("peer", 1, 60.0), ("jaxserve", 1, 66.0)]
    starts = [Start(name, (name, "--port", "1"), {}, 2.0, 2.5, 800.0) for name in ("jaxserve", "peer")]
    return Pairing("peer", starts, [sample(*rate, others=others) for rate in rates])


def test_rows_show_both_medians_the_ratio_and_its_range() -> None:
    (row,) = [line for line in page(pairing()).splitlines() if line.startswith("| chat x 4 | peer")]
    assert "78.0 / 60.0 = **1.30x (1.10-1.50)**" in row
    assert "**0.79x (0.67-0.91)**" in row  # time to first token: less is better


def test_peers_of_a_cell_stand_together() -> None:
    other_cell = Cell("chat", 32, 72)
    comparisons = [
        Comparison(peer, cell, "output_throughput", 1.0, 1.0, 1.0, 1.0, 1.0, 3)
        for peer in ("a", "b")
        for cell in (CHAT, other_cell)
    ]
    rows = comparison_table(comparisons).splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| chat x 4", "a"],
        ["| chat x 4", "b"],
        ["| chat x 32", "a"],
        ["| chat x 32", "b"],
    ]


def test_shares_of_the_bound_follow_from_the_figures() -> None:
    (row,) = [line for line in page(pairing()).splitlines() if line.startswith("| chat x 4 | 78.0")]
    assert row == "| chat x 4 | 78.0 | 126.0 | 62% | 52.5 | 17.9 | 34% |"


def test_servers_that_were_skipped_or_broke_off_are_named() -> None:
    broken = pairing()
    broken.problem = "peer ended during the benchmark"
    text = page(broken)
    assert "- other was skipped: no compiler" in text
    assert "- peer is incomplete: peer ended during the benchmark" in text


def test_a_crowded_machine_is_reported() -> None:
    assert "other programs took more" not in page(pairing())
    assert "In 4 of 4 cells other programs took more than 0.1 cores." in page(pairing(others=0.3))


def test_a_run_without_any_figures_still_gives_a_page() -> None:
    assert "peer is incomplete: no reply" in page(Pairing("peer", problem="no reply"))


def test_commands_start_with_their_environment() -> None:
    start = Start("peer", ("bin/server", "-m", "a file"), {"B": "2", "A": "1"}, 1.0, 1.0, 1.0)
    assert command_lines([start]) == "peer: A=1 B=2 bin/server -m 'a file'"


def test_folders_of_this_machine_are_not_shown() -> None:
    names = {Path("/secret/place"): "ENVS", Path("/secret"): "MODEL"}
    assert hide_folders("/secret/place/server -m /secret/w.gguf", names) == "ENVS/server -m MODEL/w.gguf"


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert markdown_table(["a"], [["b|c"]]) == "| a |\n| --- |\n| b\\|c |"
