"""Two thousand requests of all kinds, then silence: memory, descriptors, threads and idle time of both processes."""

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
"""By then caches, pools and the page table are as large as they get."""
MAX_GROWTH = 1.05
MAX_GROWTH_BYTES = 4 << 20
IDLE_SECONDS = 4.0
MAX_IDLE_SHARE = 0.02


def usages(server: Server) -> dict[str, Usage]:
    """Of both processes, at rest."""
    server.await_metric("num_requests_running", 0)
    server.await_metric("kv_cache_usage_perc", 0)
    return {"api": process_usage(server.process.pid), "engine": process_usage(server.engine_pid())}


async def test_two_thousand_requests_leave_nothing_behind(real_server: Server) -> None:
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
        assert after.num_threads == before.num_threads, name
    # Connections that clients have closed may take a moment to be closed here.
    for name, before in early.items():
        until(
            lambda name=name, before=before: usages(real_server)[name].num_descriptors <= before.num_descriptors + 2,
            f"{name}: more than {before.num_descriptors} descriptors",
        )
    assert_idle(real_server)


def assert_idle(server: Server) -> None:
    """Neither process takes more than two hundredths of a core."""
    before = usages(server)
    time.sleep(IDLE_SECONDS)
    pids = {"api": server.process.pid, "engine": server.engine_pid()}
    for name, pid in pids.items():
        ticks = process_usage(pid).cpu_ticks - before[name].cpu_ticks
        share = ticks / os.sysconf("SC_CLK_TCK") / IDLE_SECONDS
        assert share < MAX_IDLE_SHARE, f"{name}: {share:.1%} of a core"
