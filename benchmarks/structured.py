"""Measure the cost of structured output: `python -m benchmarks.structured [MODEL]`.

Starts one `jaxserve serve`. First it compares the throughput of constrained and free streams, in turns;
no stream ends early, so all generate the same number of tokens. Then it compares the longest pause between two chunks
of free streams with and without hostile grammars.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import aiohttp

from benchmarks.servers import served
from jaxserve.runtime.tasks import running
from jaxserve.tools.bench.serving import Level, Load, connected
from jaxserve.tools.bench.workload import make_workload

PERSON: Final = {
    "type": "object",
    "properties": {"first_name": {"type": "string"}, "age": {"type": "integer"}, "is_member": {"type": "boolean"}},
    "required": ["first_name", "age", "is_member"],
    "additionalProperties": False,
}
PEOPLE: Final = {"type": "array", "items": PERSON, "minItems": 500, "maxItems": 500}
FORMS: Final[dict[str, dict[str, Any]]] = {
    "free": {},
    "schema": {"structured_outputs": {"json": PEOPLE}},
    "schema, every token sampled": {"structured_outputs": {"json": PEOPLE}, "presence_penalty": 0.001},
    "any text": {"structured_outputs": {"regex": r"(?s:.){5000,}"}},
}
"""The third tells what tokens without choice save: a request with penalties samples them too."""
HOSTILE: Final = (
    {"regex": "(a|aa|aaa)*(b|bb)*" * 200},
    {"json": {"anyOf": [{"type": "string", "pattern": f"^(a{i}|b)*c{{1,{i + 50}}}$"} for i in range(60)]}},
    {"grammar": "start: x\nx: x x | x x x | /[a-z]/\n"},
    {"json": {"enum": [f"{i:05}" * 3 for i in range(3000)]}},
)


async def throughput(url: str, fields: Mapping[str, Any], num_streams: int, num_tokens: int) -> float:
    """Output tokens a second."""
    workload = make_workload("chat", num_output_tokens=num_tokens)
    load = Load(url=url, workload=workload, extra_body=fields, num_warmups=1)
    async with connected(load) as server:
        level = Level(num_prompts=num_streams, max_concurrency=num_streams)
        figures = await server.run(level, on_start=lambda: None, on_done=lambda record: None)
    if figures["failed"]:
        raise SystemExit(f"{figures['failed']} requests failed")
    return float(figures["output_throughput"])


async def pauses(
    url: str, num_tokens: int, beside: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]
) -> float:
    """Longest pause of four free streams, milliseconds, from their second chunk on."""
    async with aiohttp.ClientSession() as session, running(beside(session)):
        return max(await asyncio.gather(*(longest_pause_ms(session, url, num_tokens, i) for i in range(4))))


async def longest_pause_ms(session: aiohttp.ClientSession, url: str, num_tokens: int, seed: int) -> float:
    body = {
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "max_tokens": num_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        times_s = [time.perf_counter() async for line in response.content if line.startswith(b"data:")]
    return 1000 * max(late - early for early, late in itertools.pairwise(times_s[1:]))


async def nothing(session: aiohttp.ClientSession) -> None:
    """No attack."""


def attack(url: str) -> Callable[[aiohttp.ClientSession], Coroutine[Any, Any, None]]:
    """Hostile requests, one after the other, as long as they are let."""

    async def send(session: aiohttp.ClientSession) -> None:
        number = 0
        while True:
            for fields in HOSTILE:
                number += 1  # nothing is remembered from the last time
                schema = fields.get("json")
                named = {"json": schema | {"title": str(number)}} if isinstance(schema, dict) else fields
                body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "structured_outputs": named}
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    await response.read()

    return send


def compare(url: str, options: argparse.Namespace) -> None:
    """Both tables."""
    rates: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(options.rounds):
        for name, fields in FORMS.items():
            rates[name].append(asyncio.run(throughput(url, fields, options.streams, options.tokens)))
    for name, values in rates.items():
        ratio = statistics.median(one / free for one, free in zip(values, rates["free"], strict=True))
        print(f"{options.streams:3} streams  {name:30} {statistics.median(values):7.1f} tokens/s  {ratio:5.2f}x")
    quiet, hostile = [], []
    for _ in range(options.rounds):
        quiet.append(asyncio.run(pauses(url, options.tokens, nothing)))
        hostile.append(asyncio.run(pauses(url, options.tokens, attack(url))))
    for name, values in (("alone", quiet), ("beside hostile grammars", hostile)):
        print(f"longest pause  {name:25} {json.dumps([round(value) for value in values])} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: that of `jaxserve serve`")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with served(*filter(None, [options.model])) as (port, _):
        compare(f"http://127.0.0.1:{port}", options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
