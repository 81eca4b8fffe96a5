"""Measures the cost of dispatching a program, and if a loop inside one blocks the host until it ends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.context import Context
from benchmarks.gpu.timing import time_calls

NUM_MATMULS = 24
NUM_CALLS = 9


def measure(context: Context) -> None:
    _measure_arguments(context)
    _measure_loops(context)


def _measure_arguments(context: Context) -> None:
    """A program that hardly computes, by how many arrays it is passed."""
    increase = jax.jit(lambda state, arrays: state + arrays[0][0], donate_argnums=0, keep_unused=True)
    for count in (1, 12, 291):
        arrays = tuple(jnp.zeros(8, jnp.float32) for _ in range(count))
        state = [jnp.float32(0)]

        def call(arrays: tuple[jax.Array, ...] = arrays, state: list[jax.Array] = state) -> jax.Array:
            state[0] = increase(state[0], arrays)
            return state[0]

        timing = time_calls(call, jax.block_until_ready, budget_s=0.3)
        context.recorder.figure("cost of a call", arrays=count, us=timing.median_s * 1e6)


def _measure_loops(context: Context) -> None:
    """Run matmuls in a straight line, in a loop of known length, and in a loop whose length is data."""
    size = 64 if context.is_quick else 4096
    dtype = jnp.bfloat16 if context.platform == "cuda" else jnp.float32
    x, weight = jax.random.normal(jax.random.key(context.seed), (2, size, size), dtype) * jnp.asarray(size**-0.5, dtype)

    def multiply(index: Any, x: jax.Array) -> jax.Array:
        del index
        result: jax.Array = x @ weight
        return result

    def straight(x: jax.Array, count: jax.Array) -> jax.Array:
        del count
        for index in range(NUM_MATMULS):
            x = multiply(index, x)
        return x

    def known(x: jax.Array, count: jax.Array) -> jax.Array:
        del count
        result: jax.Array = jax.lax.fori_loop(0, NUM_MATMULS, multiply, x)
        return result

    def decided(x: jax.Array, count: jax.Array) -> jax.Array:
        result: jax.Array = jax.lax.fori_loop(0, count, multiply, x)
        return result

    functions: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        "straight line": straight,
        "loop of known length": known,
        "loop whose length is data": decided,
    }
    for name, function in functions.items():
        submit_s, total_s = _call_times(jax.jit(function), x, jnp.int32(NUM_MATMULS))
        context.recorder.figure(
            "loops in a program",
            program=name,
            submit_ms=submit_s * 1e3,
            total_ms=total_s * 1e3,
            submit_share=submit_s / total_s,
        )


def _call_times(program: Callable[..., jax.Array], *arguments: jax.Array) -> tuple[float, float]:
    """Until the call returns, and until its result is there."""
    program(*arguments).block_until_ready()
    submits, totals = [], []
    for _ in range(NUM_CALLS):
        started_s = time.perf_counter()
        result = program(*arguments)
        submits.append(time.perf_counter() - started_s)
        result.block_until_ready()
        totals.append(time.perf_counter() - started_s)
    return statistics.median(submits), statistics.median(totals)
