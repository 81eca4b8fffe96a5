"""Two thousand requests of all kinds, then silence: memory, descriptors, threads and wake-ups of both processes."""

from __future__ import annotations

import os
import time

import pytest

from tests.e2e.http_server import Server, until
from tests.e2e.real_server import Usage, process_usage
from tests.e2e.test_real_traffic import send_all

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

NUM_REQUESTS = 2000
NUM_FIRST = 500
"""After these, caches, pools and the page table are as large as they get."""
MAX_GROWTH = 1.05
MAX_GROWTH_BYTES = 4 << 20
MAX_NEW_THREADS = 8
"""Pools of a few threads start them when so many tasks first wait at once, which may be late."""
IDLE_S = 4.0
MAX_WAKE_UPS_PER_S = 20
"""All threads of a process together; it was 2 to 3."""
MAX_BUSY_SHARE = 0.25
"""A thread that spins takes a whole core, or half of one on a busy machine; an idle process takes 0.005."""


def usages(server: Server) -> dict[str, Usage]:
    """Return the usage of both processes at rest."""
    server.await_metric("num_requests_running", 0)
    server.await_metric("kv_cache_usage_perc", 0)
    return {"api": process_usage(server.process.pid), "engine": process_usage(server.engine_pid())}


async def test_two_thousand_requests_leave_nothing(real_server: Server) -> None:
    statuses = await send_all(real_server.url, range(NUM_FIRST), at_a_time=16)
    early = usages(real_server)
    statuses += await send_all(real_server.url, range(NUM_FIRST, NUM_REQUESTS), at_a_time=16)
    assert set(statuses) == {0, 200}
    late = usages(real_server)
    for name, before in early.items():
        after = late[name]
        limit = before.resident_bytes * MAX_GROWTH + MAX_GROWTH_BYTES
        assert after.resident_bytes < limit, (
            f"{name}: {before.resident_bytes >> 10} -> {after.resident_bytes >> 10} KiB"
        )
        assert after.num_threads <= before.num_threads + MAX_NEW_THREADS, name
    # Connections that clients have closed may take a moment to be closed here.
    for name, before in early.items():
        until(
            lambda name=name, before=before: usages(real_server)[name].num_descriptors <= before.num_descriptors + 2,
            f"{name}: more than {before.num_descriptors} descriptors",
        )
    assert_idle(real_server)


def assert_idle(server: Server) -> None:
    """Check that both processes sleep, by how often their threads wake up, and that none of their threads spins."""
    before = usages(server)
    time.sleep(IDLE_S)
    pids = {"api": server.process.pid, "engine": server.engine_pid()}
    for name, pid in pids.items():
        after = process_usage(pid)
        assert after.num_switches - before[name].num_switches < MAX_WAKE_UPS_PER_S * IDLE_S, name
        busy_s = (after.cpu_ticks - before[name].cpu_ticks) / os.sysconf("SC_CLK_TCK")
        assert busy_s < MAX_BUSY_SHARE * IDLE_S, name
