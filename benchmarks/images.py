"""Images a second, time to the first token beside transformers, and pauses of streams, on random weights of the shapes of SmolVLM-256M.

    python benchmarks/images_oracle.py make DIR tests/models/data/vision/smolvlm_tiny      (in the environment of transformers)
    python -m benchmarks.images DIR --oracle PYTHON
    python -m benchmarks.images DIR                                                        (pauses of streams only)

One run measures everything in turns: each round has every measurement once, and both sides of it right after each other, in
alternating order. transformers has a process of its own, and so has the server. `tower` is the encoder alone; `first token` goes from
the bytes of PNG files of 512 x 512 pixels to the first generated token, new pictures every time, over HTTP on our side. Pauses
are those of four streams of text: alone, beside prompts of text that fill a step, and beside pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import jax
import numpy as np
from PIL import Image

from benchmarks.images_streams import LOADS, Pauses, watch_streams
from benchmarks.processes import all_processes, tree_of
from benchmarks.servers import served
from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.executor.local import LocalExecutor
from jaxserve.scheduler.plan import EncodeItem

SIZE, PATCHES, TOKENS = 512, 1024, 64
FLAGS = (
    "--warmup=all",
    "--dtype=float32",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--served-model-name=model",
    "--max-body-size=16777216",  # eight pictures of noise in base64
)


@dataclass(frozen=True)
class Took:
    """Wall-clock seconds, and processor seconds of the side's processes."""

    wall_s: float
    processor_s: float


class Oracle:
    """transformers in a process of its own."""

    def __init__(self, python: str, model: Path) -> None:
        command = [python, str(Path(__file__).with_name("images_oracle.py")), "serve", str(model)]
        environment = os.environ | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.versions = self._read()

    def measure(self, name: str, argument: object) -> Took:
        """Return what one piece of work took."""
        assert self._process.stdin is not None
        print(json.dumps({name: argument}), file=self._process.stdin, flush=True)
        return Took(*self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class Tower:
    """The encoder's programs as the engine calls them: on CPUs one image a call."""

    def __init__(self, model: Path) -> None:
        # Enough requests for the kernels that a server with its defaults takes.
        scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16)
        config = Config(model=ModelConfig(model=str(model), dtype="float32", max_model_len=1024), scheduler=scheduler)
        self._runner = LocalExecutor.start(config, model, lambda *_: None)._runner
        self._random = np.random.RandomState(0)
        places = np.indices((32, 32)).reshape(2, -1).T
        self._places = np.ascontiguousarray(places, np.int32)

    def measure(self, count: int) -> Took:
        """Return what random pixels of `count` images take."""
        patches = [self._random.randint(0, 256, (PATCHES, 768), np.uint8) for _ in range(count)]
        started = time.perf_counter(), time.process_time()
        for index, each in enumerate(patches):
            rows = np.arange(index * TOKENS, (index + 1) * TOKENS, dtype=np.int32)
            self._runner._fill_rows([EncodeItem(each, self._places, rows)])
        jax.block_until_ready(self._runner._state.arrays.images)
        return Took(time.perf_counter() - started[0], time.process_time() - started[1])


@dataclass
class Case:
    """One measurement of both sides."""

    what: str
    count: int
    """Images at a time."""
    ours: Callable[[int], Took]
    theirs: Callable[[int], Took]
    rounds: int
    pairs: list[tuple[Took, Took]] = field(default_factory=list)

    def measure(self, number: int) -> None:
        """Measure both sides; the first round does not count."""
        if number % 2:
            own, other = self.ours(number), self.theirs(number)
        else:
            other, own = self.theirs(number), self.ours(number)
        if number:
            self.pairs.append((own, other))

    def row(self) -> str:
        """Return medians, and the median of the rounds' ratios, as a row of Markdown."""
        columns = []
        for name in ("wall_s", "processor_s"):
            seconds = [[getattr(took, name) for took in side] for side in zip(*self.pairs, strict=True)]
            ratio = statistics.median(other / own for own, other in zip(*seconds, strict=True))
            columns += [*(f"{statistics.median(side):.2f}" for side in seconds), f"{ratio:.2f}"]
        speed = self.count / statistics.median(own.wall_s for own, _ in self.pairs)
        return f"| {self.what} | {self.count} | {speed:.2f} | {' | '.join(columns)} |"


class FirstToken:
    """Requests of chat completions for one token after new pictures."""

    def __init__(self, url: str, server_pid: int, folder: Path) -> None:
        self.url, self._server_pid, self._folder, self._seed = url, server_pid, folder, 0

    def pictures(self, count: int) -> list[str]:
        """Write new PNG files and return their names."""
        files = []
        for _ in range(count):
            self._seed += 1
            noise = np.random.RandomState(self._seed).randint(0, 256, (SIZE, SIZE, 3))
            files.append(str(self._folder / f"{self._seed}.png"))
            Image.fromarray(noise.astype(np.uint8)).save(files[-1])
        return files

    def measure(self, files: list[str]) -> Took:
        """Return what it takes from files to one token."""
        started = time.perf_counter(), self._processor_s()
        data = json.dumps(chat_body([Path(file).read_bytes() for file in files])).encode()
        request = Request(f"{self.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
        with urlopen(request) as response:
            response.read()
        return Took(time.perf_counter() - started[0], self._processor_s() - started[1])

    def _processor_s(self) -> float:
        """Return the processor seconds of the server's processes so far, ended ones included."""
        return sum(each.cpu_s for each in tree_of(self._server_pid, all_processes()))


def chat_body(files: list[bytes]) -> dict[str, Any]:
    """Return a request for one token after pictures."""
    urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
    return {"model": "model", "messages": [message], "max_tokens": 1, "temperature": 0}


def cases_of(options: argparse.Namespace, oracle: Oracle, first: FirstToken) -> list[Case]:
    """Return what is compared; larger numbers of images have fewer rounds."""
    found, tower = [], Tower(options.model)

    def first_token(count: int) -> Case:
        def theirs(_: int) -> Took:
            return oracle.measure("first_token", first.pictures(count))

        return Case("first token", count, lambda _: first.measure(first.pictures(count)), theirs, rounds_of(count))

    def encoder(count: int) -> Case:
        return Case(
            "tower", count, lambda _: tower.measure(count), lambda _: oracle.measure("tower", count), rounds_of(count)
        )

    def rounds_of(count: int) -> int:
        return int(max(min(3, options.rounds), math.ceil(options.rounds / count)))

    for make in (encoder, first_token):
        found += [make(count) for count in options.counts]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--oracle", help="Python with torch and transformers (default: measure pauses only)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds with one image; with more there are fewer")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8], help="images at a time")
    parser.add_argument("--stream-rounds", type=int, default=3)
    parser.add_argument(
        "--stream-seconds", type=float, default=10.0, help="of each load beside the streams, in a round"
    )
    options = parser.parse_args()
    oracle = None if options.oracle is None else Oracle(options.oracle, options.model)
    versions = {} if oracle is None else oracle.versions
    print(json.dumps(versions | {"jax": jax.__version__, "cpus": len(os.sched_getaffinity(0))}), flush=True)
    with tempfile.TemporaryDirectory() as name, served(str(options.model), *FLAGS) as (port, pid):
        try:
            measure(options, oracle, FirstToken(f"http://127.0.0.1:{port}", pid, Path(name)))
        finally:
            if oracle is not None:
                oracle.close()


def measure(options: argparse.Namespace, oracle: Oracle | None, first: FirstToken) -> None:
    """Measure in rounds and print the tables."""
    cases = [] if oracle is None else cases_of(options, oracle, first)
    pauses = {load: Pauses() for load in LOADS}
    for number in range(1 + max([options.stream_rounds, *(case.rounds for case in cases)])):
        for case in cases:
            if number <= case.rounds:
                case.measure(number)
        if number < options.stream_rounds:
            for load, found in pauses.items():
                files = [Path(file).read_bytes() for file in first.pictures(32)]
                bodies = [chat_body([file]) for file in files]
                found.add(asyncio.run(watch_streams(first.url, load, bodies, options.stream_seconds)))
    if cases:
        print("| what | images | ours, images/s | wall s | transformers | ratio | processor s | transformers | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
        print("\n".join(case.row() for case in cases), flush=True)
    print("\n| four streams | pauses | p50 ms | p99 ms | longest ms | other requests |\n|---|---|---|---|---|---|")
    print("\n".join(f"| {load} | {found.row()} |" for load, found in pauses.items()), flush=True)


if __name__ == "__main__":
    main()
