"""Measure the API process's cost per streamed token: `python -m benchmarks.api_process`.

Starts `jaxserve serve` with the fake engine, opens `--streams` streaming chat requests at once, each with a
token a step, and counts chunks with a client that only searches bytes. The main figure is CPU time of the
API processes per chunk, from the moment every stream has begun to the moment the first one ends: it does not
depend on who else uses the machine's cores, as tokens per second do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import children_of
from benchmarks.servers import TOKENIZER, served_fake
from jaxserve.config import Config, ModelConfig, SchedulerConfig, ServerConfig
from jaxserve.ipc.engine_spec import FakeOptions

BLOCK_SIZE = 16
PROMPT_TOKENS = 256
"""More than the prompt takes."""
CHUNK = b'"delta":{"content"'
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Count:
    """Counts over all streams."""

    num_streams: int
    num_chunks: int = 0
    num_begun: int = 0
    num_ended: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)
    one_ended: asyncio.Event = field(default_factory=asyncio.Event)
    all_ended: asyncio.Event = field(default_factory=asyncio.Event)


class Stream(asyncio.Protocol):
    """One request; its reply is searched, not parsed."""

    def __init__(self, request: bytes, count: Count) -> None:
        self._request = request
        self._count = count
        self._has_begun = self._has_ended = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        self._count.num_chunks += data.count(CHUNK)
        self._tail = data[-len(CHUNK) + 1 :]
        if not self._has_begun and CHUNK in data:
            self._has_begun = True
            self._count.num_begun += 1
            if self._count.num_begun == self._count.num_streams:
                self._count.all_begun.set()
        if not self._has_ended and b"data: [DONE]" in data:
            self._has_ended = True
            self._count.one_ended.set()
            self._count.num_ended += 1
            if self._count.num_ended == self._count.num_streams:
                self._count.all_ended.set()


@dataclass(frozen=True)
class Mark:
    """State of a run."""

    seconds: float
    cpu_seconds: list[tuple[float, float]]
    """User and system time of each process."""
    num_chunks: int


async def measure(port: int, pids: list[int], num_streams: int, num_tokens: int) -> dict[str, float]:
    """One round of streams; figures of its steady part, CPU time summed over `pids`."""
    count = Count(num_streams)

    def mark() -> Mark:
        return Mark(time.monotonic(), [cpu_seconds(pid) for pid in pids], count.num_chunks)

    loop = asyncio.get_running_loop()
    request = chat_request(num_tokens)
    start = mark()
    for _ in range(num_streams):
        await loop.create_connection(lambda: Stream(request, count), "127.0.0.1", port)
    await count.all_begun.wait()
    begun = mark()
    await count.one_ended.wait()
    ended = mark()
    await count.all_ended.wait()
    end = mark()
    num_steady = ended.num_chunks - begun.num_chunks
    if num_steady < num_streams:
        raise SystemExit("the first stream ended before the last one had begun: ask for more --tokens")
    used = cpu_between(begun, ended)
    total_s = sum(map(sum, used))
    wall_s = ended.seconds - begun.seconds
    return {
        "cpu_us_per_chunk": 1e6 * total_s / num_steady,
        "of_it_in_the_kernel": 1e6 * sum(system for _, system in used) / num_steady,
        "chunks_per_cpu_second": num_steady / total_s,
        "chunks_per_second": num_steady / wall_s,
        "busiest_process": max(map(sum, used)) / wall_s,
        "cpu_us_per_chunk_with_setup": 1e6 * sum(map(sum, cpu_between(start, end))) / end.num_chunks,
        "chunks_per_token": end.num_chunks / (num_streams * num_tokens),
    }


def cpu_between(early: Mark, late: Mark) -> list[tuple[float, float]]:
    """User and system time each process took."""
    pairs = zip(early.cpu_seconds, late.cpu_seconds, strict=True)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def chat_request(num_tokens: int) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me of the sea."}],
            "max_tokens": num_tokens,
            "stream": True,
            "ignore_eos": True,
        }
    )
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) * TICK_S, int(fields[12]) * TICK_S


@contextlib.contextmanager
def server(options: argparse.Namespace) -> Iterator[tuple[int, list[int]]]:
    """The port, and the ids of the API processes."""
    num_pages = options.streams * -(-(PROMPT_TOKENS + options.tokens) // BLOCK_SIZE)
    config = Config(
        model=ModelConfig(model=options.model, served_model_name="bench"),
        scheduler=SchedulerConfig(max_num_seqs=options.streams, max_num_batched_tokens=8 * options.streams),
        server=ServerConfig(api_processes=options.api_processes),
    )
    fake = FakeOptions(
        vocab_size=options.vocab,
        num_blocks=num_pages + 1,
        device_seconds=options.step_ms / 1e3,
        max_decode_steps=1,  # a step, a message: a token is a chunk
    )
    with served_fake(config, fake, options.profile) as (port, pid):
        yield port, [pid, *children_of(pid, "jaxserve.runtime.api_worker")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="requests at the same time")
    parser.add_argument("--tokens", type=int, default=150, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=40.0, help="shortest duration of an engine step")
    parser.add_argument("--api-processes", type=int, default=1, help="figures are sums over them")
    parser.add_argument("--model", default=str(TOKENIZER), help="whose tokenizer to use")
    parser.add_argument("--vocab", type=int, default=384, help="token ids the engine draws from")
    parser.add_argument("--profile", metavar="FILE", help="write a cProfile of the API process; it runs slower then")
    options = parser.parse_args()
    with server(options) as (port, pids):
        asyncio.run(measure(port, pids, options.streams, options.tokens))  # not counted: caches fill
        rounds = [asyncio.run(measure(port, pids, options.streams, options.tokens)) for _ in range(options.rounds)]
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        print(f"{name:28} median {statistics.median(values):10.2f}   {min(values):10.2f} to {max(values):10.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
