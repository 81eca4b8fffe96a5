"""Clients that come and go while the engine is frozen: the server stays small, answers, and loses no request."""

from __future__ import annotations

import os
import signal

import pytest

from benchmarks.overload import PROMPT_CHARS, Flood, memory_cap, resident_bytes
from tests.e2e.http_server import running
from tests.processes import freeze

NUM_REQUESTS = 1500
MAX_SEQS, MAX_QUEUED = 8, 100
MAX_TOKENS = MAX_QUEUED * PROMPT_CHARS // 2


@pytest.mark.slow
async def test_flood_against_a_frozen_engine_is_refused_and_takes_bounded_memory() -> None:
    scheduler = {"max_num_seqs": MAX_SEQS, "max_queued_requests": MAX_QUEUED, "max_queued_tokens": MAX_TOKENS}
    with running(scheduler=scheduler, server={"stall_timeout": 0}) as server:
        flood, before = Flood(server.port), resident_bytes(server.process.pid)
        engine = server.engine_pid()
        freeze(engine)
        for number in range(NUM_REQUESTS):
            await flood.send(number)
            if number % 250 == 0:
                status, _ = await flood.health()
                assert status == 200
        await flood.wait_until(MAX_TOKENS // PROMPT_CHARS)  # the others are refused while the engine is frozen
        growth = resident_bytes(server.process.pid, "VmHWM") - before
        os.kill(engine, signal.SIGCONT)
        await flood.wait()
        assert flood.statuses == {200: flood.statuses[200], 429: flood.statuses[429]}  # none broke off
        assert sum(flood.statuses.values()) + flood.num_abandoned == NUM_REQUESTS
        assert 0 < flood.statuses[200] <= MAX_TOKENS // PROMPT_CHARS
        assert growth < memory_cap(MAX_SEQS + MAX_QUEUED, MAX_TOKENS)
        server.await_metric("num_requests_running", 0)
        server.await_metric("queued_prompt_tokens", 0)
        assert server.metric("event_loop_longest_turn_seconds") > 0
