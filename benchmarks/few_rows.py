"""Measure how fast a CPU reads the weights of matmuls of few rows: `python -m benchmarks.few_rows`.

Decode steps of few requests consist of them. Weights are more than any cache holds. Shows GB/s of weights, the median of some runs in turn
(the best): compare two commits in turns, or with the bytes a second that `make bench-peers` says the memory gives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels import native
from jaxserve_kernels.matmul import matmul

FORMATS: Final = ("float32", "float16", "bfloat16", "int8-weight-only", "int8")
_NUM_OUTPUTS: Final = 2304
_NUM_BYTES: Final = 400 << 20


def make_read(format_name: str, num_rows: int, num_inputs: int, num_bytes: int) -> tuple[Callable[[], object], int]:
    """Return a function that multiplies rows with matrices of `num_bytes` together, and their exact bytes."""
    is_int8 = format_name.startswith("int8")
    dtype = jnp.dtype("int8" if is_int8 else format_name)
    count = max(1, num_bytes // (_NUM_OUTPUTS * num_inputs * dtype.itemsize))
    random = np.random.default_rng(0)
    first = random.integers(-127, 128, (_NUM_OUTPUTS, num_inputs)).astype(np.int8)
    weights = [jnp.asarray(np.roll(first, shift)).astype(dtype) for shift in range(count)]
    scales = jnp.ones(_NUM_OUTPUTS, jnp.float32) if is_int8 else None
    x = jnp.asarray(random.standard_normal((num_rows, num_inputs), dtype=np.float32))

    @jax.jit
    def read(x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
        outputs = [matmul(x, each, scales, dynamic=format_name == "int8", backend="native") for each in weights]
        return sum(each.sum() for each in outputs)  # type: ignore[return-value]

    return lambda: read(x, weights).block_until_ready(), sum(each.nbytes for each in weights)


def measure(formats: Sequence[str], rows: Sequence[int], num_inputs: int, num_bytes: int, num_runs: int) -> str:
    """Return a line for each format, with GB/s for each number of rows."""
    lines = [f"{'inputs':>6} {'weights':<16} " + " ".join(f"{f'{count} rows':>14}" for count in rows)]
    for format_name in formats:
        reads = [make_read(format_name, count, num_inputs, num_bytes) for count in rows]
        seconds = list[list[float]]()
        for run in range(num_runs + 1):
            seconds.append([])
            for read, _ in reads:
                started = time.perf_counter()
                read()
                seconds[run].append(time.perf_counter() - started)
        rates = [
            [size / 1e9 / run[i] for run in seconds[1:]] for i, (_, size) in enumerate(reads)
        ]  # the first compiles
        shown = [f"{statistics.median(each):.1f} ({max(each):.1f})" for each in rates]
        lines.append(f"{num_inputs:>6} {format_name:<16} " + " ".join(f"{each:>14}" for each in shown))
    return "\n".join(lines)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_rows", description=__doc__)
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of weights (default: all)"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 3, 4, 8], metavar="N", help="(default: 1 2 3 4 8)"
    )
    parser.add_argument("--inputs", type=int, nargs="+", default=[768, 2304], metavar="N", help="(default: 768 2304)")
    parser.add_argument("--bytes", type=int, default=_NUM_BYTES, help=f"of weights of a matmul (default: {_NUM_BYTES})")
    parser.add_argument("--runs", type=int, default=9, help="each number of rows in turn (default: 9)")
    arguments = parser.parse_args(words)
    if native.register() is None:
        print("no native kernels: build them with `python -m jaxserve_kernels.native.build`", file=sys.stderr)
        return 2
    for num_inputs in arguments.inputs:
        print(measure(arguments.formats, arguments.rows, num_inputs, arguments.bytes, arguments.runs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
