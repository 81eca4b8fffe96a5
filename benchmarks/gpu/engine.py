"""Part 3, the engine: steps of a random Llama-3.1-8B, the loop around them, and bursts inside a program."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.gpu import dispatch
from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.rig import generate, greedy
from benchmarks.gpu.steps import StepBench, measured_model
from jaxserve.runner.inputs import Program
from jaxserve.tools.bench.report import percentile

BURST = 8
NUM_CALLS = 5
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 48
COMPILE_SHARE = 0.6
"""Most of the part's time for compiling, as a fraction; programs compiled by then are measured."""
REFERENCE_SHARE = 0.6
"""Fraction of the remaining time for compiling steps of the reference."""
MORE_PROGRAMS_S = {"more batches": 20.0, "bursts": 25.0, "reference": 25.0}
"""Seconds that must be left for work that compiles more programs."""


def run(context: Context) -> None:
    first_device(context)
    recorder, is_quick = context.recorder, context.is_quick
    few, more = ((1, 4), (2,)) if is_quick else ((1, 32, 256), (8, 64, 128))
    contexts = (64, 128) if is_quick else (1024, 4096)
    cells = list(itertools.product(contexts, few))
    shape, name = measured_model(context)
    policy = server_policy(context, shape)
    work: dict[str, Callable[[StepBench], None]] = {}
    for tokens, rows in cells:
        work[f"decode {rows} x {tokens}"] = partial(StepBench.decode_step, count=rows, tokens=tokens)
    for tokens in contexts:
        work[f"prefill {tokens}"] = partial(StepBench.prefill, length=tokens)
    for rows in (0, 1, few[1] - 1):
        work[f"mixed, {rows} decode"] = partial(StepBench.mixed_step, count=rows, tokens=contexts[0])
    for rows, top_p in itertools.product(few[1:], (0.9, 0.999)):
        work[f"top-p {top_p}, {rows} rows"] = partial(
            StepBench.sampled_step, count=rows, tokens=contexts[0], top_p=top_p
        )
    for rows, depth in itertools.product(few, (1, 0)):
        work[f"loop {rows}, depth {depth}"] = partial(run_loop, context, batch=rows, depth=depth)
    work["more batches"] = partial(run_more_batches, context, batches=more, contexts=contexts)
    if policy.backend != "reference":
        work["reference"] = partial(run_reference, context, batches=few[1:2], tokens=contexts[0])
    work["bursts"] = partial(run_bursts, context, batches=few[:2], tokens=contexts[0])
    recorder.expect(["dispatch", *work])
    bench = StepBench(
        context,
        shape,
        policy,
        label=f"{name}{policy.activations.name}",
        batches=few,
        chunk=64 if is_quick else 2048,
        cells=[(rows, tokens) for tokens, rows in itertools.product(contexts, (*few, *more))],
        compile_s=COMPILE_SHARE * recorder.left_s,
    )
    for name, measure in work.items():
        needed_s = 0.0 if is_quick else MORE_PROGRAMS_S.get(name, 0.0)
        if recorder.left_s < needed_s:
            recorder.problem(name, f"not begun: {recorder.left_s:.0f} s were left")
            continue
        recorder.attempt(name, partial(measure, bench))
    recorder.attempt("dispatch", lambda: dispatch.measure(context))


def run_loop(context: Context, bench: StepBench, *, batch: int, depth: int) -> None:
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


def run_more_batches(
    context: Context, bench: StepBench, *, batches: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    """Measure decode steps of other sizes, whose programs are compiled when everything else has its figures."""
    with bench.by_others(batches, REFERENCE_SHARE * context.recorder.left_s):
        for tokens, rows in itertools.product(contexts, batches):
            bench.decode_step(rows, tokens)


def run_reference(context: Context, bench: StepBench, *, batches: tuple[int, ...], tokens: int) -> None:
    """Measure the same steps with attention by XLA only."""
    with bench.by_reference(batches, REFERENCE_SHARE * context.recorder.left_s):
        for batch in batches:
            bench.decode_step(batch, tokens)


def run_bursts(context: Context, bench: StepBench, *, batches: tuple[int, ...], tokens: int) -> None:
    """Eight steps in one call, against eight calls that are each read: does a loop keep the host from going on?"""
    rig, largest = bench.rig, max(program.num_slots for program in bench.made)
    wanted = [Program("decode", batch, batch, rig.max_pages, largest, BURST) for batch in batches]
    made = bench.compile(wanted, context.recorder.left_s - 5)
    for batch in batches:
        _calls(context, bench, list(bench.made), batch, tokens, 1)
    bench.release()
    bench.runner = rig.runner(bench.params, made, pool_seed=context.seed)
    for batch in batches:
        _calls(context, bench, list(made), batch, tokens, BURST)


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
