"""Serve mixed traffic for a long time while processes are killed, and check that nothing is lost or left.

`python -m benchmarks.soak --minutes 30 --out soak.png` starts `jaxserve serve` with two API processes and one adapter, sends
requests of all kinds, of which some are left early, and kills the engine and API processes in turn. It fails if a request
takes more than two minutes in which the engine serves, if the end of one is neither a whole reply nor one that a kill
explains, if a killed process is not replaced within five minutes, if a program is compiled while serving, or if memory,
descriptors or threads grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp

from benchmarks.adapters import write_adapter
from benchmarks.servers import served
from benchmarks.soak.picture import Kill, Sample, draw
from benchmarks.soak.processes import Role, Usage, pids_of, usages
from benchmarks.soak.traffic import Ended, Traffic
from jaxserve.models.registry import open_model
from jaxserve.runtime.environment import default_model

ADAPTER: Final = "kitchen"
RANK: Final = 8
SAMPLE_S: Final = 5.0
KILL_S: Final = 180.0
"""Seconds from the recovery after a kill to the next: the engine, then an API process, in turns."""
GRACE_S: Final = 5.0
"""Time after the server is whole again in which a reply may still tell of the kill."""
MAX_WAIT_S: Final = 120.0
"""The longest that a request may take, not counting the time in which a killed engine is being replaced."""
MAX_BACK_S: Final = 300.0
"""The longest that a killed process may take to be replaced."""
POLL_S: Final = 0.5
NUM_PROBES: Final = 16
"""Connections that must find the server ready after a kill: the kernel shares them out among the API processes."""
MIN_SAMPLES: Final = 3
"""One in each third of the time."""
MAX_GROWTH: Final = 1.05
MAX_GROWTH_BYTES: Final = 8 << 20
FLAGS: Final = (
    *("--warmup", "all", "--max-model-len", "2048", "--api-processes", "2", "--engine-restarts", "1000"),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "256"),
)


class Soak:
    """One run against one server."""

    def __init__(self, server_pid: int, url: str) -> None:
        self.server_pid, self.url = server_pid, url
        self.traffic = Traffic(url, ADAPTER)
        self.samples: list[Sample] = []
        self.kills: list[Kill] = []
        self.errors: list[str] = []
        """Errors of the tasks that take samples and kill processes."""
        self.began_s = time.monotonic()

    async def run(self, minutes: float, num_clients: int) -> None:
        """Send traffic, take samples and kill processes."""
        stop_s = self.began_s + 60 * minutes
        helpers = [asyncio.create_task(self._sample()), asyncio.create_task(self._kill())]
        try:
            await self.traffic.run(num_clients, stop_s)
        finally:
            for helper in helpers:
                helper.cancel()
            ends = await asyncio.gather(*helpers, return_exceptions=True)
            self.errors += [f"the soak itself failed: {end!r}" for end in ends if isinstance(end, Exception)]

    async def metrics(self) -> dict[str, float]:
        """Return the samples of `/metrics` by name and labels; none while the server is busy with a kill."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session,
                session.get(f"{self.url}/metrics") as reply,
            ):
                lines = (
                    line.rpartition(" ") for line in (await reply.text()).splitlines() if line[:1] not in ("#", "")
                )
                return {name: float(value) for name, _, value in lines}
        return {}

    async def is_ready(self) -> bool:
        """Return True if an engine serves."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session,
                session.get(f"{self.url}/ready") as reply,
            ):
                return reply.status == 200
        return False

    async def _sample(self) -> None:
        while True:
            found = await self.metrics()
            running = sum(value for name, value in found.items() if "num_requests_running" in name)
            self.samples.append(Sample(time.monotonic() - self.began_s, usages(self.server_pid), running))
            await asyncio.sleep(SAMPLE_S)

    async def _kill(self) -> None:
        roles: tuple[Role, ...] = ("engine", "api")
        while True:
            for role in roles:
                await asyncio.sleep(KILL_S)
                pids = pids_of(self.server_pid, role)
                kill = Kill(time.monotonic() - self.began_s, role)
                self.kills.append(kill)
                os.kill(pids[0], signal.SIGKILL)
                await self._await_back(role, pids)
                kill.back_s = time.monotonic() - self.began_s

    async def _await_back(self, role: Role, before: Sequence[int]) -> None:
        """Wait until the first of the processes `before` is replaced, and all API processes serve."""
        while True:
            left = pids_of(self.server_pid, role)
            if before[0] not in left and len(left) == len(before):
                answers = await asyncio.gather(*(self.is_ready() for _ in range(NUM_PROBES)))
                if all(answers):
                    return
            await asyncio.sleep(POLL_S)

    def faults(self, compiled: float | None) -> list[str]:
        """Return what went wrong, in one line each. compiled: programs compiled while serving; None if it is not known."""
        found = list(self.errors)
        if compiled is None:
            found.append("/metrics did not answer at the end: compiled programs are not known")
        elif compiled:
            found.append(f"{compiled:g} programs were compiled while serving")
        end_s = self.samples[-1].time_s if self.samples else 0.0
        found += [
            f"{kill.role}, killed at {kill.time_s:.0f} s, was not replaced within {MAX_BACK_S:.0f} s"
            for kill in self.kills
            if min(kill.back_s, end_s) > kill.time_s + MAX_BACK_S
        ]
        for each in self.traffic.ended:
            waited_s = self._waited_s(each)
            is_wrong = each.outcome == "wrong" or not (each.outcome in ("ok", "silent") or self._is_explained(each))
            if is_wrong or waited_s > MAX_WAIT_S:
                began, took = each.began_s - self.began_s, each.ended_s - each.began_s
                found.append(
                    f"{each.kind}, sent at {began:.0f} s: {each.outcome} after {took:.0f} s,"
                    f" {waited_s:.0f} of them with an engine; {each.detail}"
                )
        return found + self._growth()

    def _waited_s(self, ended: Ended) -> float:
        """Return how long a request took, without the time in which a killed engine was being replaced."""
        began_s, ended_s = ended.began_s - self.began_s, ended.ended_s - self.began_s
        without_engine_s = sum(
            max(0.0, min(ended_s, kill.back_s) - max(began_s, kill.time_s))
            for kill in self.kills
            if kill.role == "engine"
        )
        return ended_s - began_s - without_engine_s

    def _is_explained(self, ended: Ended) -> bool:
        """Return True if the client left, or a process was killed while the request ran or shortly before."""
        if ended.outcome in ("left", "busy"):
            return True
        roles = {"error event": ("engine",), "refused": ("engine", "api"), "cut": ("api",)}[ended.outcome]
        return any(
            kill.role in roles
            and ended.ended_s > self.began_s + kill.time_s
            and ended.began_s < self.began_s + kill.back_s + GRACE_S
            for kill in self.kills
        )

    def _growth(self) -> list[str]:
        """Compare the last third with the one before it: by then caches are as large as they get."""
        if len(self.samples) < MIN_SAMPLES:
            return [f"growth is not known from {len(self.samples)} samples"]
        found, end_s = [], self.samples[-1].time_s
        middle = [each for each in self.samples if end_s / 3 <= each.time_s < 2 * end_s / 3]
        last = [each for each in self.samples if each.time_s >= 2 * end_s / 3]
        measures: list[tuple[str, Callable[[Usage], float], float]] = [
            ("bytes", lambda usage: usage.resident_bytes, MAX_GROWTH_BYTES),
            ("descriptors", lambda usage: usage.num_descriptors, 16),
            ("threads", lambda usage: usage.num_threads, 2),
        ]
        for role in ("supervisor", "api", "engine"):
            for name, value, slack in measures:
                before, after = (_median(part, role, value) for part in (middle, last))
                if after > before * MAX_GROWTH + slack:
                    found.append(f"{role}: {before:,.0f} {name}, then {after:,.0f}")
        return found


def _median(samples: Sequence[Sample], role: str, value: Callable[[Usage], float]) -> float:
    return statistics.median(value(usage) for each in samples for usage in each.usages if usage.role == role)


@contextlib.contextmanager
def soaked(flags: Sequence[str]) -> Iterator[Soak]:
    """Start the default model with an adapter; the server is ended with the block."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-soak-") as folder:
        adapter = Path(folder, ADAPTER)  # of few matrices, small enough to keep texts readable
        write_adapter(adapter, open_model(default_model()), RANK, seed=0, projections=("q_proj",))
        with served(*FLAGS, *flags, "--lora-modules", f"{ADAPTER}={adapter}") as (port, pid):
            yield Soak(pid, f"http://127.0.0.1:{port}")


async def measure(run: Soak, minutes: float, num_clients: int) -> list[str]:
    """Run the soak; returns its faults."""
    await run.run(minutes, num_clients)
    found = await run.metrics()
    compiled = (value for name, value in found.items() if "compilations_total" in name and 'phase="serving"' in name)
    return run.faults(sum(compiled) if found else None)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="default: %(default)g")
    parser.add_argument("--clients", type=int, default=6, help="requests at the same time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("soak.png"), help="the picture (default: %(default)s)")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="more flags of `jaxserve serve`, after --")
    arguments = parser.parse_args()
    with soaked(arguments.flags) as run:
        faults = asyncio.run(measure(run, arguments.minutes, arguments.clients))
    draw(run.samples, run.kills, arguments.out)
    counts = {kind: dict(outcomes) for kind, outcomes in run.traffic.counts().items()}
    kills = [f"{kill.role} at {kill.time_s:.0f} s, back after {kill.back_s - kill.time_s:.1f} s" for kill in run.kills]
    print(json.dumps({"requests": len(run.traffic.ended), "kills": kills, "outcomes": counts}, indent=2))
    for line in faults:
        print(f"FAULT: {line}")
    print(f"{arguments.minutes:g} minutes: {len(faults)} faults; picture: {arguments.out}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
