"""A part of the GPU check that ends early keeps its findings and does not affect later parts."""

from __future__ import annotations

import _thread
import json
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import BOUNDS_PART, main, run_all
from benchmarks.gpu.bounds import find_bounds
from benchmarks.gpu.context import Bounds
from benchmarks.gpu.parts import PARTS, total_budget_s
from benchmarks.gpu.processes import ROOT, Orders, Outcome, make_environment, run_part, unpack, with_more
from benchmarks.gpu.records import Recorder, read_records
from tests.unit.benchmarks.gpu_broken_parts import FAILURES
from tests.unit.benchmarks.gpu_stub import ENDS_ONCE, FINE, HANGS, HANGS_ONCE, RAISES, WRONG


@dataclass(frozen=True)
class StubPart:
    name: str = "stub"
    budget_s: float = 20.0
    is_check: bool = True
    title: str = "a stub"
    module: str = "tests.unit.benchmarks.gpu_stub"
    attempt_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def orders(folder: Path, seed: int) -> Orders:
    environment = make_environment("cpu", None, folder)
    return Orders(
        platform="cpu",
        is_quick=True,
        seed=seed,
        attention_backend="reference",
        folder=folder,
        results=folder,
        environment=environment,
        log=folder / "log.txt",
    )


BROKEN = "tests.unit.benchmarks.gpu_broken_parts"


def run_stub(folder: Path, seed: int, *, limit_s: float = 20.0, bounds: Bounds | None = None) -> Outcome:
    return run_part(StubPart(), limit_s, orders(folder, seed), bounds)  # type: ignore[arg-type]


def figures(outcome: Outcome, table: str) -> list[dict[str, Any]]:
    return [dict(record.values) for record in outcome.records if record.kind == "figure" and record.name == table]


def test_all_parts_together_take_less_than_nine_minutes() -> None:
    assert total_budget_s() < 540
    assert {part.name for part in PARTS if part.is_check} == {"kernels", "models"}


def test_page_tells_every_part_and_its_time() -> None:
    page = (ROOT / "docs" / "benchmarks" / "gpu-check.md").read_text(encoding="utf-8")
    assert [part.name for part in PARTS if f"| `{part.name}` | {part.budget_s:.0f} |" not in page] == []


def test_flags_of_a_part_are_added_to_those_of_all_parts() -> None:
    models = next(part for part in PARTS if part.name == "models")
    found = with_more({"XLA_FLAGS": "--first", "HOME": "/"}, models.environment)
    assert found == {"XLA_FLAGS": "--first --xla_gpu_autotune_level=0", "HOME": "/"}
    assert with_more({"HOME": "/"}, {}) == {"HOME": "/"}


def test_part_is_given_its_time_and_the_bounds(tmp_path: Path) -> None:
    outcome = run_stub(tmp_path, FINE, bounds=Bounds(8e9, 1.0))
    (given,) = figures(outcome, "given")
    assert outcome.status == "done" and outcome.is_right
    assert 10 < given["left_s"] < 20
    assert given["copy"] == 0.5
    assert given["attention_backend"] == "reference"
    assert find_bounds(outcome.records, None) == Bounds(2e9, 3e12)


def test_wrong_result_is_no_failure_of_the_part_but_not_right(tmp_path: Path) -> None:
    outcome = run_stub(tmp_path, WRONG)
    assert outcome.status == "done"
    assert not outcome.is_right


def test_part_that_raises_leaves_its_records_and_one_line(tmp_path: Path) -> None:
    outcome = run_stub(tmp_path, RAISES)
    assert outcome.status == "failed" and not outcome.is_right
    assert outcome.records[-1].kind == "problem"
    assert outcome.records[-1].text == "ValueError: two lines"
    assert figures(outcome, "given")
    assert "Traceback" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "problem"), [(ENDS_ONCE, "exit code 3"), (HANGS_ONCE, "more than 1 s")])
def test_attempt_that_takes_its_process_along_is_named_and_the_others_are_made_once(
    seed: int, problem: str, tmp_path: Path
) -> None:
    outcome = run_part(StubPart(attempt_s=1.0), 30.0, orders(tmp_path, seed), None)  # type: ignore[arg-type]
    problems = [(record.name, record.text) for record in outcome.records if record.kind == "problem"]
    assert [name for name, _ in problems] == ["second", "never begun"]
    assert problem in problems[0][1] and "not reached" in problems[1][1]
    assert [row["attempt"] for row in figures(outcome, "made")] == ["first", "third"]
    assert outcome.status == "incomplete"


@pytest.mark.slow
def test_part_that_hangs_is_killed_and_leaves_its_records(tmp_path: Path) -> None:
    """It would hang for ever; the limit leaves a loaded machine time to start it."""
    outcome = run_stub(tmp_path, HANGS, limit_s=3.0)
    assert outcome.status == "timed out" and not outcome.is_right
    assert figures(outcome, "given")


def test_unused_time_goes_to_later_parts_and_results_are_written_after_each(tmp_path: Path) -> None:
    parts: list[Any] = [StubPart("first"), StubPart("second")]
    outcomes = run_all(parts, orders(tmp_path, FINE), {})
    (first,), (second,) = (figures(outcome, "given") for outcome in outcomes)
    assert second["left_s"] > first["left_s"] + 5
    results = json.loads((tmp_path / "results.json").read_text())
    assert [part["status"] for part in results["parts"]] == ["done", "done"]
    assert "1 of 1 checks passed" in (tmp_path / "results.md").read_text()


def test_interrupted_run_keeps_what_the_part_had_found(tmp_path: Path) -> None:
    given, parts = orders(tmp_path, HANGS), [StubPart("first"), StubPart("second")]

    def interrupt() -> None:
        while not any(record.kind == "check" for record in read_records(tmp_path / "first.jsonl")):
            time.sleep(0.01)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    (outcome,) = run_all(parts, given, {})  # type: ignore[arg-type]
    assert (outcome.part.name, outcome.status) == ("first", "timed out")
    (part,) = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert any(record["name"] == "given" for record in part["records"])


def test_parts_after_the_one_of_the_bounds_are_given_them(tmp_path: Path) -> None:
    parts: list[Any] = [StubPart(BOUNDS_PART.name), StubPart("second")]
    first, second = (figures(outcome, "given")[0] for outcome in run_all(parts, orders(tmp_path, FINE), {}))
    assert (first["copy"], second["copy"]) == (None, 2.0)
    assert "copy 2 GB/s (measured in the same run)" in (tmp_path / "results.md").read_text()


def test_work_that_begins_after_the_deadline_is_named_and_not_done(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "records", time.monotonic() - 1)
    recorder.attempt("late", lambda: pytest.fail("it was done"))
    (record,) = read_records(tmp_path / "records")
    assert (record.kind, record.name) == ("problem", "late")


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "records", time.monotonic() + 9)
    recorder.note("whole")
    with (tmp_path / "records").open("a") as file:
        file.write('{"kind": "no')
    assert [record.text for record in read_records(tmp_path / "records")] == ["whole"]


def test_carried_wheels_can_be_imported_but_not_in_place_of_installed_packages(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    for name in ("carried", "pytest"):
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "NUMBER = 7\n")
    site = unpack(tmp_path / "wheels", tmp_path / "site")
    code = "import carried, sys; sys.exit(carried.NUMBER)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, check=False).returncode == 7
    assert [file.name for file in site.iterdir() if file.suffix == ".py"] == ["carried.py"]


def test_part_that_is_not_a_default_runs_only_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def note(parts: list[Any], *_: object) -> list[Outcome]:
        asked.append([part.name for part in parts])
        (tmp_path / "results.md").touch()
        return []

    monkeypatch.setattr("benchmarks.gpu.__main__.run_all", note)
    main(["--out", str(tmp_path)])
    main(["--only", "tune", "--out", str(tmp_path)])
    updates = {"graph_updates", "graph_updates_none", "graph_updates_skip_temp", "graph_updates_skip_profiled"}
    left_out = {"profile", "attention_mma", "latents", "states", "tune", "tune_matmuls", "tune_groups"} | updates
    assert asked == [[part.name for part in PARTS if part.name not in left_out], ["machine", "tune"]]


def test_folder_of_wheels_that_is_not_there_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--wheels", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "no such folder" in capsys.readouterr().err


QUICK_PARTS = ("machine", "kernels", "matmuls")
"""Attempts that raise, and a part that ends its process. An attempt that never ends: `HANGS_ONCE` above."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [QUICK_PARTS, pytest.param([part.name for part in PARTS if part.is_default], marks=pytest.mark.exhaustive)],
    ids=["quick", "all"],
)
def test_every_part_has_a_whole_table_though_one_attempt_of_each_fails(names: Sequence[str], tmp_path: Path) -> None:
    """A dummy run at tiny sizes on a CPU: what fails is named, and everything else is there."""
    (tmp_path / "work").mkdir()
    parts: list[Any] = [
        replace(part, own_module=BROKEN, budget_s=240.0, attempt_s=15.0 if FAILURES[part.name][1] == "hangs" else None)
        for part in PARTS
        if part.name in names
    ]
    given = replace(orders(tmp_path / "work", 7), results=tmp_path, log=tmp_path / "log.txt")
    outcomes = {outcome.part.name: outcome for outcome in run_all(parts, given, {"seed": 7}, data_sheet="h200")}
    problems = {
        name: [record.name for record in outcome.records if record.kind == "problem"]
        for name, outcome in outcomes.items()
    }
    named = {name: [attempt] for name, (attempt, _) in FAILURES.items() if attempt and name in names}
    log = (tmp_path / "log.txt").read_text(errors="replace")[-4000:]
    assert {name: found for name, found in problems.items() if name in named} == named, log
    assert {name for name, outcome in outcomes.items() if outcome.status == "failed"} == {"kernels", "peers"} & {*names}
    if "attention" in outcomes:
        decode = figures(outcomes["attention"], "decode attention, one layer")
        assert [(row["batch"], row["context"]) for row in decode] == [(1, 64), (1, 128), (2, 128)]
        assert all(row["of_copy"] > 0 for row in decode), "against the data sheet, since no copy was measured"
    page = (tmp_path / "results.md").read_text()
    assert "4,800 GB/s (published spec" in page and "TFLOP/s (measured in the same run)" in page
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert {"results.md", "results.json", "log.txt"} <= set(archive.getnames())
