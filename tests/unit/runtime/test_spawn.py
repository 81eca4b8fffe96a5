"""Variables of an engine process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jaxserve.runtime.spawn import engine_environment


@pytest.mark.parametrize(("num_processors", "shares_an_arena"), [(1, True), (4, True), (5, False), (16, False)])
def test_threads_share_an_arena_of_malloc_on_few_processors_only(num_processors: int, shares_an_arena: bool) -> None:
    assert ("arena_max=1" in engine_environment(num_processors)["GLIBC_TUNABLES"]) == shares_an_arena


def test_processors_are_those_that_this_process_may_use() -> None:
    assert engine_environment() == engine_environment(len(os.sched_getaffinity(0)))


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux only")
@pytest.mark.parametrize(("num_processors", "most_arenas"), [(2, 0), (16, 4)])
def test_glibc_takes_the_variables(num_processors: int, most_arenas: int) -> None:
    """An arena of another thread begins at a multiple of 64 MiB, most of which it only reserves."""
    script = (
        "import threading\n"
        "barrier = threading.Barrier(5)\n"
        "def work():\n"
        "    kept = [bytearray(1000) for _ in range(100)]\n"
        "    barrier.wait()\n"
        "    barrier.wait()\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "barrier.wait()\n"
        "reserved = [line.split()[0].split('-')[1] for line in open('/proc/self/maps') if ' ---p ' in line]\n"
        "print(sum(int(end, 16) % (64 << 20) == 0 for end in reserved))\n"
        "barrier.wait()\n"
    )
    environment = {**os.environ, **engine_environment(num_processors)}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (int(found.stdout) >= most_arenas) if most_arenas else (int(found.stdout) == 0)
