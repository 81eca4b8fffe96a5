"""Floods a server whose engine is frozen: `python -m benchmarks.overload --requests 10000`.

Starts `jaxserve serve` with the fake engine, stops the engine process (SIGSTOP) and sends streaming requests, every second of
which is abandoned at once. Meanwhile it asks `/health` and watches the memory of the API process. Then the engine goes on,
and every request that was kept must end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.processes import children_of
from benchmarks.servers import TOKENIZER, served_fake
from jaxserve.config import Config, ModelConfig, ServerConfig
from jaxserve.ipc.engine_spec import FakeOptions

PROMPT_CHARS: Final = 1000
"""Tokens of each prompt: the tokenizer has one for each byte."""
BASE_BYTES: Final = 48 << 20
CONNECTION_BYTES: Final = 64 << 10
TOKEN_BYTES: Final = 48


def memory_cap(num_connections: int, num_queued_tokens: int) -> int:
    """Return the bytes by which an API process may grow with text requests (docs/operating.md)."""
    return BASE_BYTES + num_connections * CONNECTION_BYTES + num_queued_tokens * TOKEN_BYTES


@dataclass
class Flood:
    """Requests to one server, and what became of them."""

    port: int
    statuses: Counter[int] = field(default_factory=Counter)
    """Replies to kept requests by status; 0: the reply broke off."""
    num_abandoned: int = 0
    _kept: list[asyncio.Task[None]] = field(default_factory=list)

    async def send(self, number: int) -> None:
        """Send a request. Odd ones are abandoned once they are sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        prompt = [65 + (number * 7 + place) % 26 for place in range(PROMPT_CHARS)]
        body = json.dumps({"prompt": prompt, "max_tokens": 2, "stream": True}).encode()
        writer.write(request("POST", "/v1/completions", body))
        await writer.drain()
        if number % 2:
            self.num_abandoned += 1
            writer.close()
        else:
            self._kept.append(asyncio.create_task(self._read(reader, writer)))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.close()
        status = int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0
        is_whole = status != 200 or b"data: [DONE]" in data
        self.statuses[status if is_whole else 0] += 1

    @property
    def num_waiting(self) -> int:
        """Kept requests without a reply."""
        return sum(not task.done() for task in self._kept)

    async def wait_until(self, num_waiting: int) -> None:
        """Wait until at most so many kept requests have no reply."""
        while True:
            if self.num_waiting <= num_waiting:
                return
            await asyncio.sleep(0.02)

    async def wait(self) -> None:
        """Wait until every kept request has its reply."""
        await asyncio.gather(*self._kept)

    async def health(self) -> tuple[int, float]:
        """Return the status of `/health` and the seconds that it took."""
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request("GET", "/health"))
        data = await reader.read()
        writer.close()
        return int(data[9:12]), time.monotonic() - began_s


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """Return an HTTP request that closes its connection."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def resident_bytes(pid: int, name: str = "VmRSS") -> int:
    """Return the memory of a process: VmRSS now, VmHWM at most so far."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, "Linux reports it"
    return int(found[1]) << 10


async def measure(port: int, api_pid: int, engine_pid: int, num_requests: int) -> dict[str, object]:
    """Flood the server; returns the figures."""
    flood, before = Flood(port), resident_bytes(api_pid)
    os.kill(engine_pid, signal.SIGSTOP)
    slowest_s, seen, began_s = 0.0, Counter[int](), time.monotonic()
    for number in range(num_requests):
        await flood.send(number)
        if number % 100 == 0:
            status, seconds = await flood.health()
            seen[status] += 1
            slowest_s = max(slowest_s, seconds)
    flooded_s, num_waiting = time.monotonic() - began_s, flood.num_waiting
    os.kill(engine_pid, signal.SIGCONT)
    await flood.wait()
    return {
        "requests": num_requests,
        "abandoned": flood.num_abandoned,
        "seconds": round(flooded_s, 1),
        "waited for the engine": num_waiting,
        "replies by status": dict(flood.statuses),
        "/health by status": dict(seen),
        "slowest /health, seconds": round(slowest_s, 3),
        "MB before": before >> 20,
        "MB at most": resident_bytes(api_pid, "VmHWM") >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    arguments = parser.parse_args()
    model = ModelConfig(model=str(TOKENIZER), served_model_name="tiny")
    config = Config(model=model, server=ServerConfig(stall_timeout=0))
    with served_fake(config, FakeOptions(num_blocks=8192)) as (port, pid):
        (engine,) = children_of(pid, "jaxserve.engine.process")
        for name, value in asyncio.run(measure(port, pid, engine, arguments.requests)).items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
