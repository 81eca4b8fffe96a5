"""A real model under traffic of all kinds: nothing is compiled, nothing is left."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest

from tests.e2e.http_server import Server
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

COMPILATIONS = 'compilations_total{engine="0",model_name="tiny",phase='
ABORTED = 'request_success_total{engine="0",finished_reason="abort"'
NUM_ATTEMPTS, NUM_LOOKS = 20, 100
"""Attempts to leave while all replies of a request run, and looks at the metrics in each."""


def body(chance: random.Random) -> dict[str, Any]:
    """Return a valid request of any kind."""
    prompt_len = chance.choice([1, 2, 15, 16, 17, 31, 33, 64, 150, 300])
    return {
        "prompt": [chance.randrange(3, 320) for _ in range(prompt_len)],
        "max_tokens": chance.choice([1, 2, 17, 40, 90]),
        "n": chance.choice([1, 1, 1, 2, 4]),
        "stream": chance.random() < 0.5,
        "seed": chance.randrange(1000),
        "temperature": chance.choice([0, 0.7, 1.0, 2.0]),
        "top_p": chance.choice([1.0, 0.9, 0.1]),
        "top_k": chance.choice([0, 1, 5, 200]),
        "min_p": chance.choice([0.0, 0.2]),
        "logprobs": chance.choice([None, None, 0, 5, 20]),
        "stop": chance.choice([None, None, "e", ["the", "\n", "a"]]),
        "stop_token_ids": chance.choice([None, [5, 6, 7]]),
        "ignore_eos": chance.random() < 0.5,
    }


async def send(session: aiohttp.ClientSession, chance: random.Random) -> int:
    """Send one request and return its status; 0 if this client left before the end."""
    request = body(chance)
    leaves = chance.random() < 0.2
    try:
        async with asyncio.timeout(chance.uniform(0.0, 0.2) if leaves else None):
            async with session.post("/v1/completions", json=request) as response:
                await response.read()
                return response.status
    except TimeoutError:
        return 0


async def send_all(url: str, seeds: range, *, at_a_time: int) -> list[int]:
    """Send one request per seed and return the statuses."""
    places = asyncio.Semaphore(at_a_time)
    async with aiohttp.ClientSession(url) as session:

        async def one(seed: int) -> int:
            async with places:
                return await send(session, random.Random(seed))

        return await asyncio.gather(*(one(seed) for seed in seeds))


async def test_mixed_traffic_compiles_nothing_and_leaves_nothing(real_server: Server) -> None:
    """Send more requests at a time than may run."""
    statuses = await send_all(real_server.url, range(150), at_a_time=24)
    assert set(statuses) == {0, 200}, "some were meant to be left, the others to be answered"
    real_server.await_metric("num_requests_running", 0)
    real_server.await_metric("num_requests_waiting", 0)
    real_server.await_metric("kv_cache_usage_perc", 0)
    assert real_server.metric(COMPILATIONS + '"serving"') == 0
    for program in ('"16",engine="0",kind="decode"', '"32",engine="0",kind="mixed"'):
        assert real_server.metric("bucket_steps_total{bucket=" + program) > 0, "whole batches were meant"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_disconnect_frees_its_pages(real_server: Server, is_streamed: bool) -> None:
    """The replies take a second: on a busy machine they may have ended before all were seen to run."""
    for _ in range(NUM_ATTEMPTS):
        aborted = real_server.metric(ABORTED)
        if not all_run_until_the_client_leaves(real_server, is_streamed):
            continue
        real_server.await_metric("num_requests_running", 0)
        real_server.await_metric("kv_cache_usage_perc", 0)
        if real_server.metric(ABORTED) == aborted + 16:
            return
    raise AssertionError(f"in none of {NUM_ATTEMPTS} attempts were all 16 aborted")


def all_run_until_the_client_leaves(server: Server, is_streamed: bool) -> bool:
    """Ask for 16 replies and leave; returns True if all of them were seen to run."""
    options = {"max_tokens": 500, "n": 16, "ignore_eos": True, "stream": is_streamed}
    with open_post(server, {"prompt": [5] * 10} | options) as connection:
        if is_streamed:
            read_until(connection, b'"text"')
        for _ in range(NUM_LOOKS):
            if server.metric("num_requests_running") == 16:
                return server.metric("kv_cache_usage_perc") > 0
    return False


def test_more_than_fit_wait_and_all_end(real_server: Server) -> None:
    with open_post(real_server, {"prompt": "x", "max_tokens": 30, "n": 40, "ignore_eos": True}) as connection:
        reply = read_until(connection, b'"usage"')
        assert b" 200 " in reply.splitlines()[0]
    assert reply.count(b'"finish_reason":"length"') == 40
