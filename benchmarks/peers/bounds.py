"""Measure this machine's highest rates, in a separate process: `python -m benchmarks.peers.bounds BYTES`.

    read  bytes a second of one pass over float32 data as large as the weights
    gemm  floating-point operations a second of the best large float32 matmul

From these follow the tokens a second that no engine with float32 weights can pass here. Attention, norms and
everything on the host are taken to cost nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.environment import last_error
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.tools.planning.devices import Rates
from jaxserve.tools.planning.roofline import decode_bound
from jaxserve.tools.planning.sizes import Sizes, make_sizes

NUM_COLUMNS = 4096
READ_REPEATS = 8
GEMM_SIZES = (1024, 2048)
GEMM_REPEATS = 5
TIMEOUT_S = 300.0
BYTES_PER_WEIGHT = 4


class BoundsError(Exception):
    """The measurement did not end well; the text is one line."""


@dataclass(frozen=True, slots=True)
class MachineBounds:
    """The fastest of several runs, each by numpy and by JAX."""

    read_bytes_per_s: float
    gemm_flops: float

    @property
    def rates(self) -> Rates:
        """Rates in the planner's form."""
        return Rates.alike(self.read_bytes_per_s, self.gemm_flops, "measured in the same run")


def model_sizes(source: Path) -> Sizes:
    """Return the sizes of a checkpoint's model with float32 weights."""
    return make_sizes(make_skeleton(decoder_of(open_model(source)), plain(np.dtype(np.float32))))


def step_bound_s(sizes: Sizes, bounds: MachineBounds, num_streams: int) -> float:
    """Least seconds of one decode step: reading every weight, or computing with it, whichever takes longer."""
    return decode_bound(sizes, bounds.rates, BYTES_PER_WEIGHT, num_streams, context=0, fits=True).step_s


def output_bound(
    sizes: Sizes, bounds: MachineBounds, *, num_streams: int, num_prompt_tokens: float, num_output_tokens: float
) -> float:
    """Most output tokens a second of `num_streams` requests at a time, their prompts included.

    `num_prompt_tokens` are those computed, not those found in a cache. The prompt's step gives the first token; the
    weights are not read for it, since a step may hold several prompts.
    """
    prompt_flop = 2 * (sizes.num_layer_weights * num_prompt_tokens + sizes.num_head_weights)
    steps_s = (num_output_tokens - 1) * step_bound_s(sizes, bounds, num_streams)
    return num_streams * num_output_tokens / (steps_s + num_streams * prompt_flop / bounds.gemm_flops)


def best_of(first: MachineBounds, second: MachineBounds) -> MachineBounds:
    return MachineBounds(max(first.read_bytes_per_s, second.read_bytes_per_s), max(first.gemm_flops, second.gemm_flops))


def measure_bounds(num_bytes: int) -> MachineBounds:
    """In a new process, so that its memory and threads are gone afterwards. Raises BoundsError."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.peers.bounds", str(num_bytes)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BoundsError(f"the machine's bounds were not measured within {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise BoundsError(f"the machine's bounds cannot be measured: {last_error(done.stderr)}")
    return MachineBounds(**json.loads(done.stdout.splitlines()[-1]))


def _fastest_s(work: Callable[[], object], repeats: int) -> float:
    work()  # first use: pages, threads, compilation
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


def _measure(num_bytes: int, num_threads: int) -> MachineBounds:
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)
    rows = num_bytes // (BYTES_PER_WEIGHT * NUM_COLUMNS)
    matrix = random.random((rows, NUM_COLUMNS), dtype=np.float32)
    vector = random.random(NUM_COLUMNS, dtype=np.float32)
    parts = np.array_split(matrix, num_threads)
    matmul = jax.jit(jnp.dot)
    with ThreadPoolExecutor(num_threads) as pool:
        readers: list[Callable[[], object]] = [
            lambda: matrix @ vector,
            lambda: list(pool.map(lambda part: part @ vector, parts)),
            lambda: list(pool.map(lambda part: part.max(), parts)),
        ]
        device_matrix, device_vector = jnp.asarray(matrix), jnp.asarray(vector)
        readers.append(lambda: matmul(device_matrix, device_vector).block_until_ready())
        read_s = min(_fastest_s(read, READ_REPEATS) for read in readers)
    flops = 0.0
    for size in GEMM_SIZES:
        square = random.random((size, size), dtype=np.float32)
        device_square = jnp.asarray(square)
        for multiply in (
            lambda square=square: square @ square,
            lambda square=device_square: matmul(square, square).block_until_ready(),
        ):
            flops = max(flops, 2 * size**3 / _fastest_s(multiply, GEMM_REPEATS))
    return MachineBounds(matrix.nbytes / read_s, flops)


if __name__ == "__main__":
    found = _measure(int(sys.argv[1]), len(os.sched_getaffinity(0)))
    print(json.dumps(asdict(found)))
