"""Part 4: what else this machine has, on the same device and the same model with random weights of its own.

A plain torch decode step, as one would write it (static KV cache, scaled_dot_product_attention, a CUDA graph), torch's
flash attention over a prompt, and transformers' continuous batching. Neither is needed: where they are not installed, the part says so.
"""

from __future__ import annotations

import gc
import importlib.util
from functools import partial

from benchmarks.gpu import hub_batching, torch_loop
from benchmarks.gpu.context import Context


def run(context: Context) -> None:
    if importlib.util.find_spec("torch") is None:
        context.recorder.note("torch is not installed: there is nothing to compare with")
        return
    lengths = (64,) if context.is_quick else (1024, 4096)
    batches = (1, 2) if context.is_quick else (1, 32)
    prompts = lengths if context.is_quick else (512, 2048, 8192, 32768)
    context.recorder.expect(f"torch {batch} x {length}" for length in lengths for batch in batches)
    context.recorder.expect([*(f"torch prefill {length}" for length in prompts), "transformers"])
    with torch_loop.model(context) as layers:
        for length in lengths:
            for batch in batches:
                context.recorder.attempt(
                    f"torch {batch} x {length}", partial(torch_loop.measure, context, layers, batch, length)
                )
    for length in prompts:
        context.recorder.attempt(f"torch prefill {length}", partial(torch_loop.measure_prefill, context, length))
    gc.collect()
    if importlib.util.find_spec("transformers") is None:
        context.recorder.note("transformers is not installed")
        return
    context.recorder.attempt("transformers", lambda: hub_batching.measure(context))
