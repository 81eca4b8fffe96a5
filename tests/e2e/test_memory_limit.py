"""A real memory limit, as a container has one: the KV cache follows it, and an engine that the kernel kills comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.http_server import ROOT, SOURCES, START_TIMEOUT_S, await_ready, launched, until
from tests.e2e.memory_group import MemoryGroup, memory_group
from tests.e2e.real_server import COLD_START_TIMEOUT_S, FEW_PROGRAMS, model
from tests.e2e.test_engine_restarts import STOPPED, text_of
from tests.e2e.test_http_raw import open_post, read_until

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZES = """
import jax
from jaxserve.config import CacheConfig
from jaxserve.runner.host.memory import available_bytes
from jaxserve.runner.memory import check_host_memory, kv_cache_bytes
device = jax.devices()[0]
whole, rest = (kv_cache_bytes(CacheConfig(), device, 1, held) for held in (0, 400 << 20))
check_host_memory(rest, 400 << 20, CacheConfig())
print(available_bytes(), whole, rest)
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(f"jaxserve-test-{os.getpid()}") as found:
        if found is None:
            pytest.skip("this process may not make a control group with a memory limit")
        yield found


def serve(folder: Path, programs: Path) -> list[str]:
    """Return the command of a server of the tiny model."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(model().path), "--port", "0", *FEW_PROGRAMS]
    command += ["--served-model-name", "tiny", "--cpu-kernels", "xla", "--compile-cache", str(programs)]
    return [*command, "--uds-dir", str(folder)]


def test_the_kv_cache_takes_a_quarter_of_what_the_limit_leaves(group: MemoryGroup) -> None:
    group.limit(1024 * MIB)
    environment = os.environ | {"PYTHONPATH": SOURCES, "JAX_PLATFORMS": "cpu"}
    command = group.inside(sys.executable, "-c", SIZES)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    available, whole, after_weights = map(int, done.stdout.split())
    assert 400 * MIB < available < 1024 * MIB
    assert available / 8 < whole <= available / 4, "a quarter, rounded down"
    assert whole / 4 < after_weights < whole
    assert "MiB are left beside weights and KV cache; compiling takes about 512" in done.stderr


def test_an_engine_that_does_not_fit_the_limit_ends_the_start_with_a_line_that_says_so(
    group: MemoryGroup, tmp_path: Path, programs: Path
) -> None:
    group.limit(100 * MIB)
    with launched(group.inside(*serve(tmp_path, programs))) as server:
        assert server.process.wait(COLD_START_TIMEOUT_S) == 2
        server.reader.join()
    assert "the engine process was ended by signal 9 for lack of memory (raise the memory limit" in server.lines[-1]
    assert "Traceback" not in server.output


def test_an_engine_that_the_kernel_kills_at_the_limit_comes_back(
    group: MemoryGroup, tmp_path: Path, programs: Path
) -> None:
    group.limit(2048 * MIB)
    with launched(group.inside(*serve(tmp_path, programs))) as server:
        await_ready(server, COLD_START_TIMEOUT_S)
        text = text_of(server)
        body = {"prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "stream": True}
        # It has more than an API process and less than the engine: if one death does not suffice at once, the second is its own.
        neighbour = subprocess.Popen(group.taking(160 * MIB, 64 * MIB), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with neighbour, open_post(server, body) as stream:
            assert neighbour.stdout is not None and neighbour.stdout.readline()
            read_until(stream, b'"text"')
            group.limit(group.used_bytes + 16 * MIB)
            neighbour.communicate(b"go on")
            rest = read_until(stream, b"data: [DONE]\n\n")
        assert rest.count(b'data: {"error":') == rest.count(STOPPED) == 1
        assert server.request("GET", "/live")[0] == 200
        until(lambda: "the engine is back after" in server.output, "never came back", START_TIMEOUT_S)
        assert "the engine process was ended by signal 9 for lack of memory (raise the memory limit" in server.output
        assert text_of(server) == text
        assert server.stop() == 0
        assert "Traceback" not in server.output
