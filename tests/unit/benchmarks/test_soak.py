"""The verdict of a soak counts every reply that no kill explains, and growth, as faults."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.soak import __main__ as soak_module
from benchmarks.soak.__main__ import GRACE_S, NUM_PROBES, Soak, measure
from benchmarks.soak.picture import Kill, Sample
from benchmarks.soak.processes import Role, Usage
from benchmarks.soak.traffic import Ended, Outcome, Received, Traffic, stream_outcome

WHOLE = 'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (WHOLE, "ok"),
        (
            'data: {"choices": []}\n\ndata: {"error": {"message": "The engine has died."}}\n\ndata: [DONE]\n\n',
            "error event",
        ),
        (WHOLE.removesuffix("data: [DONE]\n\n"), "cut"),
        ("", "cut"),
    ],
)
def test_a_stream_ends_whole_with_an_error_or_not_at_all(text: str, outcome: Outcome) -> None:
    assert stream_outcome(text)[0] == outcome


def soak(*ended: Ended, kills: list[Kill], growing: Role | None = None) -> Soak:
    """Return a soak of 30 minutes; one role may need 3 MiB more each minute."""
    run = Soak(1, "http://localhost")
    run.began_s, run.kills, run.traffic.ended = 0.0, kills, list(ended)
    roles: tuple[Role, ...] = ("supervisor", "api", "engine")
    for minute in range(31):
        usages = [Usage(n, role, (100 + 3 * minute * (role == growing)) << 20, 20, 8) for n, role in enumerate(roles)]
        run.samples.append(Sample(60.0 * minute, usages, 2))
    return run


@pytest.mark.parametrize(
    ("outcome", "began_s", "ended_s", "is_fault"),
    [
        ("ok", 0, 1, False),
        ("left", 0, 1, False),
        ("busy", 0, 1, False),
        ("ok", 200, 321, True),
        ("silent", 700, 841, False),  # 130 s of them without an engine
        ("silent", 700, 960, True),
        ("silent", 899, 1019, False),
        ("silent", 899, 1021, True),  # an API process that is being replaced makes no other wait
        ("wrong", 99, 101, True),
        ("error event", 99, 101, False),
        ("refused", 104, 105, False),
        ("refused", 110 + GRACE_S, 120, True),
        ("error event", 97, 99, True),
        ("cut", 99, 101, True),  # an engine's death cuts no connection
        ("cut", 499, 501, False),
    ],
)
def test_only_a_kill_explains_a_reply_that_is_not_whole(
    outcome: Outcome, began_s: float, ended_s: float, is_fault: bool
) -> None:
    kills = [Kill(100, "engine", back_s=110), Kill(500, "api", back_s=501), Kill(701, "engine", back_s=831)]
    kills.append(Kill(900, "api", back_s=1000))
    assert bool(soak(Ended("chat", outcome, began_s, ended_s), kills=kills).faults(compiled=0)) is is_fault


def test_programs_that_are_compiled_and_memory_that_grows_are_faults() -> None:
    assert soak(kills=[]).faults(compiled=0) == []
    assert soak(kills=[]).faults(compiled=2) == ["2 programs were compiled while serving"]
    (fault,) = soak(kills=[], growing="engine").faults(compiled=0)
    assert fault.startswith("engine: 150,")


def test_a_killed_process_that_is_not_replaced_is_a_fault() -> None:
    late, never, last = Kill(100, "engine", back_s=401), Kill(1400, "api"), Kill(1790, "engine")
    assert soak(kills=[late, never, last]).faults(compiled=0) == [
        "engine, killed at 100 s, was not replaced within 300 s",
        "api, killed at 1400 s, was not replaced within 300 s",
    ]


async def test_a_killed_process_is_back_when_every_api_process_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked = 0

    async def is_ready() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked != NUM_PROBES

    run = soak(kills=[])
    monkeypatch.setattr(run, "is_ready", is_ready)
    monkeypatch.setattr(soak_module, "pids_of", lambda server, role: [8])
    monkeypatch.setattr(soak_module, "POLL_S", 0.0)
    await run._await_back("api", [7])
    assert num_asked == 2 * NUM_PROBES


async def test_a_part_of_the_soak_that_fails_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    run, sent = soak(kills=[]), asyncio.Event()

    async def no_engine() -> None:
        sent.set()
        raise IndexError("no engine to kill")

    async def no_metrics() -> dict[str, float]:
        return {}

    async def traffic(num_clients: int, stop_s: float) -> None:
        await sent.wait()

    monkeypatch.setattr(run, "_kill", no_engine)
    monkeypatch.setattr(run, "_sample", asyncio.Event().wait)
    monkeypatch.setattr(run, "metrics", no_metrics)
    monkeypatch.setattr(run.traffic, "run", traffic)
    failed, unanswered = await measure(run, minutes=0, num_clients=0)
    assert "no engine to kill" in failed
    assert unanswered.startswith("/metrics did not answer")


def test_a_soak_without_samples_says_so() -> None:
    run = soak(kills=[])
    run.samples.clear()
    assert run.faults(compiled=0) == ["growth is not known from 0 samples"]


async def test_a_reply_that_breaks_off_is_recorded_with_the_part_that_arrived() -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(b"abc")
        assert request.transport is not None
        request.transport.close()
        return reply

    app = web.Application()
    app.router.add_post("/{path:.*}", broken)
    async with TestServer(app) as server:
        traffic = Traffic(str(server.make_url("/")).rstrip("/"), "kitchen")
        await traffic.run(1, time.monotonic() + 0.5)
    assert traffic.ended[0].outcome == "cut"
    assert re.fullmatch(
        r"ClientPayloadError \(status 200, 3 bytes, the first after \d\.\d s\)", traffic.ended[0].detail
    )


def test_a_request_without_an_answer_is_recorded_as_such() -> None:
    assert str(Received(began_s=0.0)) == "no status"
