"""API processes of one port: shares of limits, and one set of numbers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from jaxserve.errors import UnavailableError
from jaxserve.frontend.peers import PeerProcesses
from jaxserve.ipc.stats import EngineStats
from jaxserve.metrics import Metrics


def numbered(count: float) -> Metrics:
    metrics = Metrics("m")
    metrics.inc("client_disconnects", count)
    return metrics


def disconnects(text: bytes) -> str:
    return text.decode().partition("client_disconnects_total{")[2].partition("} ")[2].partition("\n")[0]


async def test_each_process_reports_the_sum(tmp_path: Path) -> None:
    metrics = [numbered(1), numbered(20)]
    first, second = (PeerProcesses(index, 2, tmp_path) for index in range(2))
    async with first.answering(metrics[0]), second.answering(metrics[1]):
        assert disconnects(await first.exposition(metrics[0])) == "21.0"
        assert disconnects(await second.exposition(metrics[1])) == "21.0"
    assert os.listdir(tmp_path) == []


async def test_process_that_is_gone_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only, metrics = PeerProcesses(0, 2, tmp_path), numbered(1)
    async with only.answering(metrics):
        assert disconnects(await only.exposition(metrics)) == "1.0"
        with pytest.raises(UnavailableError):
            await only.exposition(metrics, is_ending=True)
    assert "API process 1 does not answer" in caplog.text


async def test_no_sum_falls_when_a_process_is_gone_and_another_takes_its_place(tmp_path: Path) -> None:
    first, second = (PeerProcesses(index, 2, tmp_path) for index in range(2))
    metrics, dead, next_ones = numbered(1), numbered(20), [numbered(300), numbered(4000)]
    dead.set("http_connections", 5)
    dead.observe("e2e_request_latency_seconds", 1.0)
    dead.record_stats(EngineStats(kv_cache_evictions=7))
    async with first.answering(metrics):
        async with second.answering(dead):
            assert disconnects(await first.exposition(metrics)) == "21.0"
        for expected in ("21.0", "21.0"):
            assert disconnects(await first.exposition(metrics)) == expected
        for following, expected in zip(next_ones, ("321.0", "4321.0"), strict=True):
            async with second.answering(following):
                text = await first.exposition(metrics)
                assert disconnects(text) == disconnects(await second.exposition(following)) == expected
        sums = text.decode()
        assert 'jaxserve:e2e_request_latency_seconds_count{engine="0",model_name="m"} 1.0' in sums
        assert 'jaxserve:http_connections{engine="0",model_name="m"} 0.0' in sums, "those of the living"
        assert 'jaxserve:kv_cache_evictions_total{engine="0",model_name="m"} 0.0' in sums, (
            "the engine tells the next one"
        )


@pytest.mark.parametrize("reply", [b"", b"cut", None], ids=["hangs up", "broken", "late"])
async def test_metrics_are_refused_while_a_process_gives_none_so_that_no_counter_falls(
    reply: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.frontend.peers.ANSWER_TIMEOUT_S", 2.0 if reply is not None else 0.0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.read()
            if reply is None:
                await asyncio.Event().wait()
            writer.write(reply or b"")

    first, metrics = PeerProcesses(0, 2, tmp_path), numbered(1)
    server = await asyncio.start_unix_server(answer, tmp_path / "api-1.sock")
    try:
        with pytest.raises(UnavailableError):
            await first.exposition(metrics)
        assert len(await first.snapshots(metrics)) == 1, "the page shows those that answer"
    finally:
        server.close()


async def test_process_without_peers_needs_no_socket(tmp_path: Path) -> None:
    alone, metrics = PeerProcesses(0, 1, tmp_path), numbered(1)
    async with alone.answering(metrics):
        assert os.listdir(tmp_path) == []
        assert disconnects(await alone.exposition(metrics)) == "1.0"


def test_shares_of_a_limit_reach_it() -> None:
    assert [PeerProcesses(0, count, Path()).share_of(10) for count in (1, 2, 3, 20)] == [10, 5, 4, 1]
