"""Part 3, the engine: steps of a random Llama-3.1-8B, the loop around them, and bursts inside a program."""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial

import numpy as np

from benchmarks.gpu import dispatch
from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.rig import generate, greedy
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.steps import StepBench
from jaxserve.runner.inputs import Program
from jaxserve.tools.bench.report import percentile

BURST = 8
NUM_CALLS = 5
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
COMPILE_SHARE = 0.6
"""Most of the part's time for compiling, as a fraction; programs compiled by then are measured."""
REFERENCE_SHARE = 0.6
"""Fraction of the remaining time for compiling steps of the reference."""
BURST_S = 25.0
"""Left for bursts, or they are not begun: two more programs have to be compiled."""


def run(context: Context) -> None:
    first_device(context)
    recorder, is_quick = context.recorder, context.is_quick
    recorder.attempt("dispatch", lambda: dispatch.measure(context))
    batches = (1, 4) if is_quick else (1, 8, 32, 64, 128, 256)
    contexts = (64, 128) if is_quick else (1024, 4096)
    cells = [(batch, length) for length, batch in itertools.product(contexts, batches)]
    shape = decoder(TINY if is_quick else LLAMA_8B)
    policy = server_policy(context, shape)
    bench = StepBench(
        context,
        shape,
        policy,
        label=policy.activations.name,
        batches=batches,
        chunk=64 if is_quick else 2048,
        cells=cells,
        compile_s=COMPILE_SHARE * recorder.left_s,
    )
    bench.decode_cells(cells)
    bench.prefill_cells(contexts)
    for batch, depth in itertools.product(batches if is_quick else (1, 32, 256), (1, 0)):
        recorder.attempt(f"loop {batch}, depth {depth}", partial(run_loop, context, bench, batch, depth))
    if policy.backend != "reference":
        compared = (1, 4) if is_quick else (32, 256)
        recorder.attempt("reference", lambda: run_reference(context, bench, compared, contexts[0]))
    if recorder.left_s > BURST_S or is_quick:
        recorder.attempt("bursts", lambda: run_bursts(context, bench, (1, 4) if is_quick else (1, 32), contexts[0]))
    else:
        recorder.problem("bursts", f"not begun: {recorder.left_s:.0f} s were left")


def run_loop(context: Context, bench: StepBench, batch: int, depth: int) -> None:
    """Requests through scheduler and loop, from the moment all of them decode."""
    random = np.random.default_rng(context.seed)
    prompts = random.integers(0, bench.rig.skeleton.config.vocab_size, (batch, PROMPT_TOKENS))
    requests = [greedy(f"request-{index}", prompt, OUTPUT_TOKENS) for index, prompt in enumerate(prompts)]
    core = bench.rig.core(bench.runner, bench.made, depth=depth)
    started_s: list[float] = []
    result = generate(core, requests, lambda: started_s.append(time.perf_counter()))
    seconds = time.perf_counter() - started_s[0]
    totals = result.totals
    num_steps = totals.steps.total()
    gaps_ms = [gap * 1e3 for gap in totals.host_gaps_s]
    context.recorder.figure(
        "engine loop",
        batch=batch,
        steps_in_flight=depth,
        step_ms=seconds / num_steps * 1e3,
        tok_per_s=totals.num_tokens / seconds,
        median_gap_ms=percentile(gaps_ms, 50) if gaps_ms else None,
        p99_gap_ms=percentile(gaps_ms, 99) if gaps_ms else None,
        steps=num_steps,
    )


def run_reference(context: Context, bench: StepBench, batches: tuple[int, ...], tokens: int) -> None:
    """A figure each of the same steps with attention by XLA alone."""
    with bench.by_reference(batches, REFERENCE_SHARE * context.recorder.left_s):
        bench.decode_cells((batch, tokens) for batch in batches)


def run_bursts(context: Context, bench: StepBench, batches: tuple[int, ...], tokens: int) -> None:
    """Eight steps in one call, against eight calls that are each read: does a loop keep the host from going on?"""
    rig, largest = bench.rig, max(program.num_slots for program in bench.made)
    wanted = [Program("decode", batch, batch, rig.max_pages, largest, BURST) for batch in batches]
    made = bench.compile(wanted, context.recorder.left_s - 5)
    for batch in batches:
        context.recorder.attempt(
            f"single steps {batch}", partial(_calls, context, bench, list(bench.made), batch, tokens, 1)
        )
    bench.release()
    bench.runner = rig.runner(bench.params, made, pool_seed=context.seed)
    for batch in batches:
        context.recorder.attempt(f"burst {batch}", partial(_calls, context, bench, list(made), batch, tokens, BURST))


def _calls(context: Context, bench: StepBench, made: list[Program], batch: int, tokens: int, num_steps: int) -> None:
    rows = bench.rows(made, batch, tokens)
    if rows is None:
        return
    num_computed = tokens - 1
    bench.runner.submit(rows.step(num_computed, has_slots=False)).result()
    submits, totals = [], []
    for _ in range(NUM_CALLS * BURST // num_steps):
        num_computed += num_steps
        started_s = time.perf_counter()
        pending = bench.runner.submit(rows.step(num_computed, num_steps=num_steps))
        submits.append(time.perf_counter() - started_s)
        num_done = pending.result().num_steps
        totals.append(time.perf_counter() - started_s)
        if num_done != num_steps:
            raise RuntimeError(f"a call of {num_steps} steps did {num_done}")
    call_s, submit_s = statistics.median(totals), statistics.median(submits)
    context.recorder.figure(
        "bursts",
        batch=batch,
        context=tokens,
        steps_per_call=num_steps,
        step_ms=call_s / num_steps * 1e3,
        submit_ms=submit_s * 1e3,
        submit_share=submit_s / call_s,
    )
