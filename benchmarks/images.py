"""Images a second and time to the first token beside transformers, on one random checkpoint of the shapes of SmolVLM-256M.

    python benchmarks/images_oracle.py make DIR tests/models/data/vision/smolvlm_tiny      (in the environment of transformers)
    python -m benchmarks.images DIR --oracle PYTHON --rounds 7

Both sides run alternately, transformers in a process of its own, and medians are compared. `tower` is the encoder alone; `first
token` goes from the bytes of PNG files of 512 x 512 pixels to the first generated token, new pictures every time.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from jaxserve import LLM, SamplingParams
from jaxserve.config import Config, ModelConfig, SchedulerConfig
from jaxserve.executor.local import LocalExecutor
from jaxserve.scheduler.plan import EncodeItem

SIZE, PATCHES, TOKENS = 512, 1024, 64


@dataclass(frozen=True)
class Took:
    """Wall-clock seconds, and processor seconds of the side's process."""

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
        scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16)
        config = Config(model=ModelConfig(model=str(model), dtype="float32", max_model_len=1024), scheduler=scheduler)
        self._runner = LocalExecutor.start(config, model, lambda *_: None)._runner
        self._random = np.random.RandomState(0)
        places = np.indices((32, 32)).reshape(2, -1).T
        self._places = np.ascontiguousarray(places, np.int32)

    def measure(self, seed: int, count: int) -> Took:
        """Return what random pixels of `count` images take; the same ones are encoded again."""
        del seed
        patches = [self._random.randint(0, 256, (PATCHES, 768), np.uint8) for _ in range(count)]
        started = now()
        for index, each in enumerate(patches):
            rows = np.arange(index * TOKENS, (index + 1) * TOKENS, dtype=np.int32)
            self._runner._fill_rows([EncodeItem(each, self._places, rows)])
        jax.block_until_ready(self._runner._state.arrays.images)
        return since(started)


class FirstToken:
    """`LLM.chat`, with its engine process and its decoding process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def measure(self, files: list[str]) -> Took:
        """Return what it takes from files to one token."""
        started = now()
        urls = ["data:image/png;base64," + base64.b64encode(Path(file).read_bytes()).decode() for file in files]
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}
        self._llm.chat([message], SamplingParams(max_tokens=1, temperature=0), progress_bar=False)
        return since(started)


def now() -> tuple[float, float]:
    """Return the wall clock and this process's processor clock."""
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> Took:
    """Return what passed since `now` returned `started`."""
    return Took(*(end - start for start, end in zip(started, now(), strict=True)))


def pictures(folder: Path, seed: int, count: int) -> list[str]:
    """Write new PNG files and return their names."""
    files = [str(folder / f"{seed}-{index}.png") for index in range(count)]
    for index, file in enumerate(files):
        noise = np.random.RandomState(1000 * seed + index).randint(0, 256, (SIZE, SIZE, 3))
        Image.fromarray(noise.astype(np.uint8)).save(file)
    return files


def compare(what: str, count: int, rounds: int, ours: Measure, theirs: Measure) -> None:
    """Measure both alternately after one round that does not count; print medians, and the median of the rounds' ratios."""
    pairs = []
    for index in range(rounds + 1):
        if index % 2:
            own, other = ours(index, count), theirs(index, count)
        else:
            other, own = theirs(index, count), ours(index, count)
        pairs.append((own, other))
    columns = []
    for name in ("wall_s", "processor_s"):
        seconds = [[getattr(took, name) for took in side] for side in zip(*pairs[1:], strict=True)]
        ratio = statistics.median(other / own if own else 0 for own, other in zip(*seconds, strict=True))
        columns += [*(f"{statistics.median(side):.2f}" for side in seconds), f"{ratio:.2f}"]
    print(f"| {what} | {count} | {' | '.join(columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--oracle", required=True, help="Python with torch and transformers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 8], help="images at a time")
    parser.add_argument("--only", choices=("tower", "first_token"))
    options = parser.parse_args()
    oracle = Oracle(options.oracle, options.model)
    print(json.dumps(oracle.versions | {"jax": jax.__version__, "cpus": len(os.sched_getaffinity(0))}), flush=True)
    print("| what | images | wall s | transformers | ratio | processor s | transformers | ratio |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    try:
        if options.only != "first_token":
            tower = Tower(options.model)
            for count in options.counts:
                compare("tower", count, options.rounds, tower.measure, lambda _, n: oracle.measure("tower", n))
        if options.only != "tower":
            compare_first_token(options.model, oracle, options.counts, options.rounds)
    finally:
        oracle.close()


def compare_first_token(model: Path, oracle: Oracle, counts: list[int], rounds: int) -> None:
    """Print the rows of the time to the first token. Our processor seconds are those of this process only: its work is elsewhere."""
    with tempfile.TemporaryDirectory() as name, LLM(str(model), dtype="float32", max_model_len=1024) as llm:
        folder, first = Path(name), FirstToken(llm)

        def ours(seed: int, count: int) -> Took:
            return first.measure(pictures(folder, 10 * count + seed, count))

        def theirs(seed: int, count: int) -> Took:
            return oracle.measure("first_token", pictures(folder, 10 * count + seed, count))

        for count in counts:
            compare("first token", count, rounds, ours, theirs)


Measure = Callable[[int, int], Took]
"""From the number of the round and of images."""


if __name__ == "__main__":
    main()
