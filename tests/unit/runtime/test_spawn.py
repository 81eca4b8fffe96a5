"""Variables of an engine process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.runtime.spawn import engine_environment

CPU = {"JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize(("num_processors", "num_arenas"), [(1, 1), (4, 1), (8, 8), (128, 16)])
def test_malloc_has_one_arena_on_few_processors_and_one_for_each_on_more(num_processors: int, num_arenas: int) -> None:
    assert f"arena_max={num_arenas}" in engine_environment(CPU, num_processors)["GLIBC_TUNABLES"].split(".")[-1]


@pytest.mark.parametrize(
    ("device", "platforms", "is_default"),
    [
        ("nvidia0", "", True),
        ("accel0", "", True),
        ("vfio/0", "tpu", True),
        ("nvidia0", "cuda,cpu", True),
        ("nvidia0", "cpu", False),
        ("nvidiactl", "", False),
    ],
)
def test_beside_an_accelerator_malloc_is_as_glibc_has_it(
    tmp_path: Path, device: str, platforms: str, is_default: bool
) -> None:
    (tmp_path / device).parent.mkdir(exist_ok=True)
    (tmp_path / device).touch()
    found = engine_environment({"JAX_PLATFORMS": platforms}, 16, tmp_path)
    assert ("GLIBC_TUNABLES" not in found) == is_default
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in found


def test_processors_are_those_that_this_process_may_use() -> None:
    assert engine_environment(CPU) == engine_environment(CPU, len(os.sched_getaffinity(0)))


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux only")
@pytest.mark.parametrize(("num_processors", "num_arenas"), [(2, 0), (16, 4)])
def test_glibc_takes_the_variables(num_processors: int, num_arenas: int) -> None:
    """An arena other than the first ends at a multiple of 64 MiB, most of which it only reserves. Four threads are enough for four."""
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
    environment = {**os.environ, **engine_environment(CPU, num_processors)}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert int(found.stdout) == num_arenas
