"""`jaxserve bench serve` against a server whose every figure is known."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from jaxserve.tokenizer.tokenizer import load_tokenizer
from jaxserve.tools.bench.client import RequestRecord, Target, send
from jaxserve.tools.bench.serving import Level, Load, arrivals, connected
from jaxserve.tools.bench.tokens import TokenizeError
from jaxserve.tools.bench.workload import Prompt, WorkloadName, make_workload
from tests.models.goldens import golden_checkpoint
from tests.unit.tools.bench.fake_server import MODEL, FakeServer, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


def measure(
    server: FakeServer,
    name: WorkloadName = "chat",
    *,
    prompt: int | None = 40,
    output: int | None = 4,
    num_prompts: int = 6,
    max_concurrency: int | None = 2,
    **changes: Any,
) -> tuple[dict[str, Any], list[RequestRecord]]:
    records: list[RequestRecord] = []
    workload = make_workload(name, num_prompt_tokens=prompt, num_output_tokens=output)
    load = Load(url=server.url, workload=workload, timeout_s=30.0, **changes)
    level = Level(num_prompts=num_prompts, max_concurrency=max_concurrency)

    async def run() -> dict[str, Any]:
        async with connected(load) as target:
            return await target.run(level, on_start=lambda: None, on_done=records.append)

    return asyncio.run(run()), records


def test_counts_come_from_the_servers_usage(server: FakeServer) -> None:
    figures, records = measure(server)
    assert (figures["completed"], figures["failed"], len(records)) == (6, 0, 6)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (6 * 40, 6 * 4)
    assert figures["total_cached_tokens"] == 6 * 3
    assert figures["output_tokens_from"] == "usage"
    assert figures["model_id"] == MODEL
    assert figures["output_throughput"] == pytest.approx(24 / figures["duration"])
    assert figures["total_token_throughput"] == pytest.approx((240 + 24) / figures["duration"])
    assert figures["request_throughput"] == pytest.approx(6 / figures["duration"])


def test_every_token_has_its_time_and_the_empty_role_chunk_has_none(server: FakeServer) -> None:
    _, records = measure(server)
    assert [len(record.chunk_times_s) for record in records] == [4] * 6
    for record in records:
        assert record.started_s < record.chunk_times_s[0] <= record.chunk_times_s[-1] <= record.finished_s


@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
@pytest.mark.parametrize("name", ["chat", "prefix", "prefill", "custom"])
def test_prompts_have_exactly_the_wanted_number_of_tokens(server: FakeServer, name: WorkloadName, backend: str) -> None:
    measure(server, name, prompt=None, output=2, num_prompts=3, backend=backend)
    assert server.lengths() == [{"chat": 128, "prefix": 1056, "prefill": 1500, "custom": 128}[name]] * 3


@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
def test_prefix_prompts_have_exactly_their_first_1024_tokens_in_common(server: FakeServer, backend: str) -> None:
    measure(server, "prefix", prompt=None, num_prompts=4, backend=backend)
    prompts = [server.words.request_ids(body) for body in server.bodies]
    common = len(list(itertools.takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts, strict=True))))
    assert common == 1024


def test_sharegpt_lengths_have_the_published_means() -> None:
    workload = make_workload("sharegpt")
    chance = random.Random(0)
    prompts, outputs = ([length.draw(chance) for _ in range(20000)] for length in (workload.prompt, workload.output))
    assert statistics.fmean(prompts) == pytest.approx(229.7, rel=0.02)
    assert statistics.fmean(outputs) == pytest.approx(203.1, rel=0.02)
    assert min(prompts) >= 4
    assert max(prompts) <= 1024
    assert statistics.median(prompts) < 180


def test_sharegpt_prompts_differ_in_length_and_none_is_shorter_than_the_template(server: FakeServer) -> None:
    figures, _ = measure(server, "sharegpt", prompt=None, output=3, num_prompts=30)
    assert len(set(server.lengths())) > 15
    assert min(server.lengths()) >= 6
    assert figures["failed"] == 0


def test_same_seed_sends_the_same_prompts_in_any_order_of_runs(server: FakeServer) -> None:
    for seed in (1, 1, 2):
        measure(server, num_prompts=2, max_concurrency=1, seed=seed)
    first, again, other = (server.bodies[i : i + 2] for i in (0, 2, 4))
    assert first == again
    assert first != other


def test_runs_of_a_sweep_share_no_prompt_and_no_prefix(server: FakeServer) -> None:
    for at_a_time in (1, 2):
        measure(server, "prefix", prompt=None, num_prompts=2, max_concurrency=at_a_time)
    systems = [body["messages"][0]["content"] for body in server.bodies]
    assert systems[0] == systems[1] != systems[2] == systems[3]
    assert len({body["messages"][1]["content"] for body in server.bodies}) == 4


def test_requests_ask_for_exactly_so_many_tokens_greedily(server: FakeServer) -> None:
    measure(server, "custom", output=7, num_prompts=1)
    (body,) = server.bodies
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (7, True, 0.0, True)
    assert body["stream_options"] == {"include_usage": True}


def test_extra_body_adds_replaces_and_removes_fields(server: FakeServer) -> None:
    measure(server, num_prompts=1, extra_body={"ignore_eos": None, "temperature": 0.5, "generation_config": "{}"})
    (body,) = server.bodies
    assert "ignore_eos" not in body
    assert (body["temperature"], body["generation_config"]) == (0.5, "{}")


def test_the_endpoint_can_be_another(server: FakeServer) -> None:
    figures, _ = measure(server, num_prompts=1, endpoint="/elsewhere")
    assert (figures["completed"], figures["endpoint"]) == (1, "/elsewhere")


def test_no_more_requests_run_at_once_than_asked(server: FakeServer) -> None:
    figures, _ = measure(server, num_prompts=12, max_concurrency=3)
    assert server.most_at_once <= 3
    assert figures["max_concurrent_requests"] <= 3


def test_a_request_rate_spreads_the_arrivals(server: FakeServer) -> None:
    figures, records = measure(server, request_rate=200.0, num_prompts=10, max_concurrency=None)
    starts = sorted(record.started_s for record in records)
    wanted = arrivals(10, 200.0, 1.0, 0)
    assert starts[-1] - starts[0] >= 0.9 * wanted[-1]
    assert figures["request_rate"] == 200.0


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float, variation: float) -> None:
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals(20001, 50.0, burstiness, 0))]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.05)
    assert arrivals(3, math.inf, burstiness, 0) == [0.0] * 3


def test_warmups_are_sent_but_not_counted(server: FakeServer) -> None:
    figures, _ = measure(server, num_prompts=2, num_warmups=3)
    assert len(server.bodies) == 5
    assert figures["completed"] == 2


def test_the_api_key_goes_along(server: FakeServer) -> None:
    measure(server, num_prompts=1, api_key="secret")
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_failed_requests_are_counted_by_kind_and_explained_and_not_measured(server: FakeServer) -> None:
    server.fail_every = 3
    figures, _ = measure(server)
    assert (figures["completed"], figures["failed"]) == (4, 2)
    assert figures["total_output_tokens"] == 16
    assert figures["error_kinds"] == {"http": 2}
    (error,) = figures["errors"]
    assert "HTTP 500" in error
    assert "planned failure" in error


@pytest.mark.parametrize("shape", [True, "text"])
def test_an_error_inside_a_stream_fails_the_request(server: FakeServer, shape: bool | str) -> None:
    server.break_stream = shape
    figures, _ = measure(server, num_prompts=2)
    assert figures["errors"] == {"in the stream: engine gone": 2}
    assert figures["error_kinds"] == {"stream": 2}
    assert figures["mean_ttft_ms"] is None


def test_a_server_without_tokenize_needs_a_tokenizer() -> None:
    with (
        running(FakeServer(tokenize="none")) as server,
        pytest.raises(TokenizeError, match=r"/tokenize answered 404.*; name the model's GGUF file .* --tokenizer"),
    ):
        measure(server)


def test_a_tokenizer_on_disk_counts_for_servers_without_tokenize() -> None:
    path = golden_checkpoint("llama3_tiny").path
    tokenizer = load_tokenizer(path)
    with running(FakeServer(tokenize="none", sends_usage=False)) as server:
        figures, _ = measure(server, num_prompts=3, backend="openai", tokenizer=path)
        assert [len(tokenizer.encode(body["prompt"])) for body in server.bodies] == [40] * 3
    assert (figures["tokenizer_id"], figures["total_input_tokens"]) == (str(path), 3 * 40)
    assert figures["total_output_tokens"] == 3 * len(tokenizer.encode("x x x x ", add_special_tokens=False))


def test_a_model_without_chat_template_is_distinguished_from_a_missing_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(golden_checkpoint("llama3_tiny").path, tmp_path, dirs_exist_ok=True)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    with running(FakeServer(tokenize="none")) as server, pytest.raises(TokenizeError, match="no chat template"):
        measure(server, tokenizer=tmp_path)


@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
def test_llama_servers_tokenize_counts_the_rendered_template(backend: str) -> None:
    with running(FakeServer(tokenize="llama")) as server:
        figures, _ = measure(server, num_prompts=2, backend=backend)
        assert server.lengths() == [40, 40]
        assert figures["failed"] == 0


def test_fields_that_a_server_refuses_are_left_out_and_reported() -> None:
    with running(FakeServer(refuses=("stream_options", "ignore_eos"))) as server:
        figures, _ = measure(server, num_prompts=2)
        assert (figures["completed"], figures["omitted_fields"]) == (2, ["stream_options", "ignore_eos"])
        assert all("ignore_eos" not in body for body in server.bodies)


def test_without_usage_and_done_the_text_is_tokenized_and_the_finish_reason_ends() -> None:
    with running(FakeServer(sends_usage=False, sends_done=False)) as server:
        figures, _ = measure(server)
    assert (figures["completed"], figures["output_tokens_from"]) == (6, "tokenizer")
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (6 * 40, 6 * 4)


def test_figures_outlive_the_servers_tokenizer() -> None:
    with running(FakeServer(sends_usage=False, forgets_tokenizer=True)) as server:
        figures, _ = measure(server)
    assert (figures["completed"], figures["output_tokens_from"]) == (6, "chunks")
    assert figures["total_output_tokens"] == 6 * 4


def test_requests_that_end_early_are_reported() -> None:
    with running(FakeServer(finishes_early=True)) as server:
        assert measure(server)[0]["short_outputs"] == 6


def test_prompts_that_the_server_counts_otherwise_are_reported(server: FakeServer) -> None:
    assert measure(server)[0]["mismatched_inputs"] == 0
    server.counts_more = True
    figures, _ = measure(server)
    assert (figures["mismatched_inputs"], figures["total_input_tokens"]) == (6, 6 * 41)


def test_a_kept_connection_that_the_server_closed_costs_no_request() -> None:
    """cpp-httplib accepts the next request on a connection and closes it without an answer."""

    async def run() -> tuple[list[str | None], int]:
        num_connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            await _read_request(reader)
            body = b'data: {"choices": [{"text": "x", "finish_reason": "length"}]}\n\n'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await _read_request(reader)
            writer.close()

        async with (
            await asyncio.start_server(serve, "127.0.0.1", 0) as listener,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            target = Target(url=url, endpoint="/", model="m", form="text", extra_body={})
            prompt = Prompt(body={"prompt": "x"}, token_ids=[1], num_output_tokens=1)
            records = [await send(session, target, prompt) for _ in range(3)]
        return [record.error for record in records], num_connections

    errors, num_connections = asyncio.run(run())
    assert errors == [None, None, None]
    assert num_connections == 3


async def _read_request(reader: asyncio.StreamReader) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return
    (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    await reader.readexactly(length)
