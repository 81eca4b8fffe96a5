"""Only when asked for: what a step takes and where its time goes, operation by operation, and the traces themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.gpu.backends import server_policy
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.plans import prompt_chunks
from benchmarks.gpu.steps import DecodeSteps, StepBench, measured_model
from benchmarks.gpu.trace import read_trace
from jaxserve.executor.profiler import Profiler

NUM_STEPS = 8
NUM_SHOWN = 12
COMPILE_SHARE = 0.7
"""Fraction of the part's time for compiling."""


def run(context: Context) -> None:
    first_device(context)
    shape, name = measured_model(context)
    batches, tokens, chunk = ((1, 4), 64, 64) if context.is_quick else ((1, 32, 128), 1024, 2048)
    policy = server_policy(context, shape)
    bench = StepBench(
        context,
        shape,
        policy,
        label=f"{name}{policy.activations.name}",
        batches=batches,
        chunk=chunk,
        cells=[(batch, tokens) for batch in batches],
        compile_s=COMPILE_SHARE * context.recorder.left_s,
    )
    context.recorder.expect([*(f"decode {batch}" for batch in batches), "prefill"])
    for batch in batches:
        context.recorder.attempt(f"decode {batch}", partial(_decode, context, bench, batch, tokens))
    context.recorder.attempt("prefill", partial(_prefill, context, bench, chunk))


def _decode(context: Context, bench: StepBench, batch: int, tokens: int) -> None:
    bench.decode_step(batch, tokens)
    rows = bench.rows(bench.made, batch, tokens)
    if rows is None:
        return
    steps = DecodeSteps(bench.runner, rows, tokens - 1)
    steps.warm_up()
    _trace(context, f"decode-{batch}", lambda: steps.stream(NUM_STEPS))


def _prefill(context: Context, bench: StepBench, chunk: int) -> None:
    program = next(each for each in bench.made if each.kind == "mixed")
    bench.prefill(chunk)
    (plan,) = prompt_chunks(program, chunk, bench.rig.skeleton.config.vocab_size, context.seed)
    bench.runner.submit(plan).result()

    def steps() -> None:
        pending = [bench.runner.submit(plan) for _ in range(NUM_STEPS)]
        pending[-1].result()

    _trace(context, f"prefill-{chunk}", steps)


def _trace(context: Context, name: str, steps: Callable[[], object]) -> None:
    """Profile `steps`, which are NUM_STEPS of them, as a server does; a figure for each of the longest operations."""
    folder = context.results / "profiles" / name
    profiler = Profiler(str(folder))
    profiler.start()
    steps()
    profiler.stop()
    found = read_trace(folder)
    if found is None:
        raise RuntimeError("the trace has no operation of a device")
    context.recorder.figure(
        "profiled steps",
        step=name,
        ms=found.span_s / NUM_STEPS * 1e3,
        busy_ms=found.busy_s / NUM_STEPS * 1e3,
        idle=1 - found.busy_s / found.span_s,
        operations=sum(each.num_calls for each in found.operations) / NUM_STEPS,
    )
    whole_s = sum(each.seconds for each in found.operations)
    for each in found.operations[:NUM_SHOWN]:
        context.recorder.figure(
            "operations",
            step=name,
            operation=each.name[:80],
            calls=each.num_calls / NUM_STEPS,
            us=each.seconds / NUM_STEPS * 1e6,
            share=each.seconds / whole_s,
        )
