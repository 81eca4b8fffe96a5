"""Times of our kernel for weights in groups, int4 and e4m3, in each of its sizes: on request, in two minutes.

Sizes are the rules of `jaxserve_kernels.matmul.gpu.grouped_choice`; a note says for which weights others were faster.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from jaxserve_kernels.matmul.tuning import SkinnyTuning

from benchmarks.gpu.backends import why_no_kernels
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.matmul_programs import Chain, Shapes, grouped_candidates
from benchmarks.gpu.matmuls import MatmulBench
from benchmarks.gpu.shapes import LLAMA_8B, decoder
from jaxserve.model_config.decoder import DecoderConfig

TOKENS = (2, 32)
"""Rows of the smallest decode program, and of a common one."""
COMPILE_SHARE = 0.6
"""Largest fraction of the part's time for compiling."""
WORTH = 0.97
"""Fraction of the server's time below which other sizes count as faster: smaller gains may be noise."""


def run(context: Context) -> None:
    first_device(context)
    config = decoder(LLAMA_8B)
    reason = why_no_kernels(config)
    if reason is not None:
        context.recorder.note(f"there is nothing to tune: {reason}")
        return
    bench = MatmulBench(context)
    compared = {
        f"{name}, {count} tokens, {plain.types}": (name, compared_sizes(plain, bench))
        for (name, shapes), count in itertools.product(fused_cells(config).items(), TOKENS)
        for plain in (Chain(shapes, "int4", count), Chain(shapes, "float8_e4m3fn", count, is_grouped=True))
    }
    context.recorder.expect(compared)
    bench.compile([each for _, found in compared.values() for each in found], COMPILE_SHARE)
    for label, (name, found) in compared.items():
        context.recorder.attempt(label, partial(_compare, context, bench, name, label, found))


def fused_cells(config: DecoderConfig) -> dict[str, Shapes]:
    """Return the weights of a layer that are multiplied in chains: those of q, k and v as one matrix."""
    model, inner = config.hidden_size, config.intermediate_size
    of_heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return {
        "q, k and v": ((of_heads, model),),
        "attention output": ((model, model),),
        "up and down": ((inner, model), (model, inner)),
    }


def compared_sizes(plain: Chain, bench: MatmulBench) -> list[Chain]:
    """Return XLA's matmul, whose result is expected, then our kernel's with all sizes, the server's first."""
    return [plain, *(replace(plain, tuning=each) for each in grouped_candidates(plain, bench.dtype))]


def _compare(context: Context, bench: MatmulBench, name: str, label: str, chains: list[Chain]) -> None:
    seconds = {chain.tuning: time_s for chain, time_s in bench.compare(name, chains).items() if chain.tuning}
    served = chains[1].tuning if len(chains) > 1 else None
    if served in seconds:
        faster = faster_sizes(seconds, served)
        if faster is not None:
            context.recorder.note(f"{label}: {faster} takes {seconds[faster] / seconds[served]:.2f} of {served}'s time")


def faster_sizes(seconds: dict[SkinnyTuning, float], served: SkinnyTuning) -> SkinnyTuning | None:
    """Return the fastest sizes, if they are well ahead of the server's."""
    best = min(seconds, key=lambda sizes: seconds[sizes])
    return best if seconds[best] < WORTH * seconds[served] else None
