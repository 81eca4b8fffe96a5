"""`jaxserve bench serve` against a server whose every figure is known."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.client import RequestRecord
from jaxserve.bench.serving import Load, run_load
from jaxserve.bench.workload import WorkloadName, make_workload
from jaxserve.cli.main import main
from tests.unit.bench.fake_server import MODEL, FakeServer, count_tokens, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


def measure(
    server: FakeServer, name: WorkloadName = "chat", *, prompt: int | None = 40, output: int | None = 4, **changes: Any
) -> tuple[dict[str, Any], list[RequestRecord]]:
    records: list[RequestRecord] = []
    workload = make_workload(name, num_prompt_tokens=prompt, num_output_tokens=output)
    settings: dict[str, Any] = {
        "url": server.url,
        "model": None,
        "workload": workload,
        "num_prompts": 6,
        "num_warmups": 0,
        "max_concurrency": 2,
        "request_rate": math.inf,
        "seed": 0,
        "api_key": None,
        "timeout_s": 30.0,
    }
    load = Load(**(settings | changes))
    return asyncio.run(run_load(load, on_done=records.append)), records


def test_counts_come_from_the_servers_usage(server: FakeServer) -> None:
    figures, records = measure(server)
    assert (figures["completed"], figures["failed"], len(records)) == (6, 0, 6)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (6 * 40, 6 * 4)
    assert figures["total_cached_tokens"] == 6 * 3
    assert figures["model_id"] == MODEL
    assert figures["output_throughput"] == pytest.approx(24 / figures["duration"])
    assert figures["total_token_throughput"] == pytest.approx((240 + 24) / figures["duration"])
    assert figures["request_throughput"] == pytest.approx(6 / figures["duration"])


def test_every_token_has_its_time_and_the_empty_role_chunk_has_none(server: FakeServer) -> None:
    _, records = measure(server)
    assert [len(record.chunk_times_s) for record in records] == [4] * 6
    for record in records:
        assert record.started_s < record.chunk_times_s[0] <= record.chunk_times_s[-1] <= record.finished_s


@pytest.mark.parametrize("name", ["chat", "prefix", "prefill", "custom"])
def test_prompts_have_exactly_the_wanted_number_of_tokens(server: FakeServer, name: WorkloadName) -> None:
    measure(server, name, prompt=None, output=2, num_prompts=3)
    wanted = {"chat": 128, "prefix": 1070, "prefill": 1500, "custom": 128}[name]
    assert [count_tokens(body) for body in server.bodies] == [wanted] * 3


def test_mixed_prompts_differ_in_length_within_their_range(server: FakeServer) -> None:
    measure(server, "mixed", prompt=None, output=None, num_prompts=8)
    lengths = {count_tokens(body) for body in server.bodies}
    assert len(lengths) > 4
    assert min(lengths) >= 48
    assert max(lengths) <= 1024
    assert len({body["max_tokens"] for body in server.bodies}) > 4


def test_prefix_prompts_share_their_system_message_and_nothing_else(server: FakeServer) -> None:
    measure(server, "prefix", prompt=None, num_prompts=3)
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 1
    assert len({body["messages"][1]["content"] for body in server.bodies}) == 3


def test_same_seed_sends_the_same_prompts(server: FakeServer) -> None:
    for seed in (1, 1, 2):
        measure(server, num_prompts=2, max_concurrency=1, seed=seed)
    first, again, other = (server.bodies[i : i + 2] for i in (0, 2, 4))
    assert first == again
    assert first != other


def test_requests_ask_for_exactly_so_many_tokens_greedily(server: FakeServer) -> None:
    measure(server, "custom", output=7, num_prompts=1)
    (body,) = server.bodies
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (7, True, 0.0, True)
    assert body["stream_options"] == {"include_usage": True}


def test_no_more_requests_run_at_once_than_asked(server: FakeServer) -> None:
    measure(server, num_prompts=12, max_concurrency=3)
    assert server.most_at_once <= 3


def test_a_request_rate_spreads_the_arrivals(server: FakeServer) -> None:
    figures, records = measure(server, request_rate=200.0, num_prompts=10, max_concurrency=None)
    starts = [record.started_s for record in records]
    assert max(starts) - min(starts) > 0.01
    assert figures["request_rate"] == 200.0


def test_warmups_are_sent_but_not_counted(server: FakeServer) -> None:
    figures, _ = measure(server, num_prompts=2, num_warmups=3)
    assert len(server.bodies) == 5
    assert figures["completed"] == 2


def test_the_api_key_goes_along(server: FakeServer) -> None:
    measure(server, num_prompts=1, api_key="secret")
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_failed_requests_are_counted_and_explained_and_not_measured(server: FakeServer) -> None:
    server.fail_every = 3
    figures, _ = measure(server)
    assert (figures["completed"], figures["failed"]) == (4, 2)
    assert figures["total_output_tokens"] == 16
    (error,) = figures["errors"]
    assert "HTTP 500" in error
    assert "planned failure" in error


def test_an_error_inside_a_stream_fails_the_request(server: FakeServer) -> None:
    server.break_stream = True
    figures, _ = measure(server, num_prompts=2)
    assert figures["errors"] == {"in the stream: engine gone": 2}
    assert figures["mean_ttft_ms"] is None


def test_command_writes_vllms_field_names(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    words = f"bench serve --url {server.url} --num-prompts 3 --input-len 32 --output-len 3 --json {file}".split()
    assert main(words) == 0
    figures = json.loads(file.read_text())
    names = {f"{kind}_{key}_ms" for kind in ("mean", "median", "p99") for key in ("ttft", "tpot", "itl", "e2el")}
    names |= {"request_throughput", "output_throughput", "total_token_throughput", "completed", "failed", "duration"}
    assert names <= figures.keys()
    assert "output tokens/s" in capsys.readouterr().out


def test_command_fails_when_a_request_failed(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail_every = 2
    assert main(f"bench serve --url {server.url} --num-prompts 2 --input-len 32".split()) == 1
    assert "1 x HTTP 500" in capsys.readouterr().out


def test_a_prompt_shorter_than_the_template_is_refused(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"bench serve --url {server.url} --num-prompts 1 --input-len 3".split()) == 1
    assert "cannot make a chat prompt of 3 tokens" in capsys.readouterr().err


def test_without_a_server_the_message_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("jaxserve bench: no server at http://127.0.0.1:1")
