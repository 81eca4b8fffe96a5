"""`jaxserve bench` as typed: flags, files, tables, exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from jaxserve.tools.bench import plot
from tests.unit.tools.bench.fake_server import FakeServer, running

PNG = b"\x89PNG\r\n"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


def bench(server: FakeServer, words: str) -> int:
    return main(f"bench serve --url {server.url} --input-len 32 --output-len 3 {words}".split())


def test_command_writes_vllms_field_names(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert bench(server, f"--num-prompts 3 --json {file} --goodput ttft:60000 e2el:60000 --save-detailed") == 0
    figures = json.loads(file.read_text())
    kinds = ("mean", "median", "std", "p50", "p90", "p99")
    names = {f"{kind}_{key}_ms" for kind in kinds for key in ("ttft", "tpot", "itl", "e2el")}
    names |= {"request_throughput", "output_throughput", "total_token_throughput", "completed", "failed", "duration"}
    names |= {"date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"}
    names |= {"max_concurrency", "total_input_tokens", "total_output_tokens", "input_lens", "output_lens", "ttfts"}
    assert names <= figures.keys()
    assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
    assert "output tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_a_list_of_concurrencies_is_a_sweep(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    words = f"--num-prompts 2,4,6 --max-concurrency 1,2,3 --json {file} --plot {picture} --label ours"
    assert bench(server, words) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [(run["max_concurrency"], run["completed"], run["label"]) for run in runs] == [
        (1, 2, "ours"),
        (2, 4, "ours"),
        (3, 6, "ours"),
    ]
    assert picture.read_bytes().startswith(PNG)
    assert "at a time" in capsys.readouterr().out


def test_a_sweep_in_a_file_has_each_figure_in_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--num-prompts 1 --max-concurrency 1,2,3,4,5,6,7,8") == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "inter-token latency (ms), median" in line]
    assert len(row.split("│")) == 11


def test_runs_of_the_same_concurrency_share_no_prompt(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, "--num-prompts 2 --max-concurrency 2,2") == 0
    assert len({json.dumps(body["messages"]) for body in server.bodies}) == len(server.bodies) == 4
    assert "of them cached" in capsys.readouterr().out


def test_command_fails_when_a_request_failed(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail_every = 2
    assert bench(server, "--num-prompts 2") == 1
    assert "1 x HTTP 500" in capsys.readouterr().out


def test_a_sweep_whose_server_ends_keeps_the_levels_that_are_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    with running(FakeServer(forgets_tokenizer=True)) as server:
        assert bench(server, f"--num-prompts 2 --max-concurrency 1,2 --json {file}") == 1
        figures = json.loads(file.read_text())
    said = capsys.readouterr()
    assert (figures["max_concurrency"], figures["completed"]) == (1, 2)
    assert "/tokenize answered 500" in figures["ended_by"]
    assert "/tokenize answered 500" in said.err
    assert "output tokens/s" in said.out


def test_a_prompt_shorter_than_the_template_is_refused(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"bench serve --url {server.url} --num-prompts 1 --input-len 3".split()) == 1
    assert "cannot make a prompt of 3 tokens" in capsys.readouterr().err


def test_a_server_that_refuses_every_request_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(refuses=("temperature",))) as server:
        assert bench(server, "") == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "answered 422 to a small request" in line
    assert "temperature" in line


def test_without_a_server_the_message_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("jaxserve bench: no server at http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--goodput itl:5", "'itl:5' is not one of ttft:MS, tpot:MS, e2el:MS"),
        ("--max-concurrency 1,x", "'x' is not a whole number"),
        ("--max-concurrency 1,0", "0 is less than 1"),
        ("--max-concurrency 1,2 --num-prompts 1,2,3", "--num-prompts has 3 numbers and --max-concurrency 2"),
        ("--metric-percentiles 50,101", "101 is not between 0 and 100"),
        ("--extra-body [1]", "a JSON object is needed, not [1]"),
        ("--extra-body {", "not JSON"),
        ("--request-rate 0", "0 is not a positive number"),
        ("--tokenizer /nowhere", "/nowhere: expected a Hugging Face directory or a GGUF file"),
        ("--plot figures.gif", "--plot figures.gif: expected a name that ends in .png, .svg, .pdf"),
        ("--plot /nowhere/figures.png", "/nowhere is not a directory"),
        ("--json /nowhere/figures.json", "/nowhere is not a directory"),
        ("--json /", "--json /: is a directory, expected a file"),
    ],
)
def test_mistakes_are_one_line(server: FakeServer, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server, words) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
    assert server.bodies == []


def test_without_matplotlib_the_message_names_the_extra(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert bench(server, "--plot figures.png") == 2
    assert "--plot needs matplotlib: pip install 'jaxserve[bench]'" in capsys.readouterr().err
    assert server.bodies == []


def test_a_picture_shows_every_server_and_leaves_out_runs_without_figures(tmp_path: Path) -> None:
    def figures(at_a_time: int, value: float | None) -> dict[str, float | None]:
        latencies = {f"{kind}_{name}_ms": value for kind in ("median", "p99") for name in ("ttft", "tpot")}
        return {"max_concurrency": at_a_time, "output_throughput": 10.0 * at_a_time, **latencies}

    runs = [figures(1, 5.0), figures(2, None), figures(4, 900.0)]
    file = tmp_path / "figures.svg"
    plot.draw({"one": runs, "another": runs, "failing": [figures(1, None)]}, file, title="chat on m")
    drawing = file.read_text()
    for text in ("chat on m", "one, median", "another, p99", "time to first token (ms)", "output tokens/s"):
        assert f"<!-- {text}" in drawing
    assert "failing" not in drawing


def test_matplotlib_is_not_imported_without_need() -> None:
    import subprocess

    script = "import sys, jaxserve.cli.bench; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
