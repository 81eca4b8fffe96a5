"""Attention by others at the sizes of part `attention`: XLA's over the same pages, and cuDNN's over dense keys and values.

A part of its own, after everything that is ours: XLA's attention is a loop whose conditions the host reads, thousands
of times for a long prompt.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.ahead import DISTURBED, Programs
from benchmarks.gpu.attention import CELL_BUDGET_S, layer_heads
from benchmarks.gpu.attention_programs import (
    decode_program,
    prefill_program,
    public_decode,
    public_prefill,
    queries,
    scattered_tables,
)
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.random_weights import random_pool
from benchmarks.gpu.shapes import LLAMA_8B, TINY, decoder
from benchmarks.gpu.timing import time_calls
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape

COMPILE_SHARE = 0.5
"""Largest fraction of the part's time for compiling."""


def run(context: Context) -> None:
    first_device(context)
    batches, lengths = ((1, 2), (64,)) if context.is_quick else ((1, 32), (512, 2048))
    prompts, dense = ((64,), (64,)) if context.is_quick else ((512, 2048), (512, 2048, 8192, 32768))
    decodes = list(itertools.product(batches, lengths))
    is_gpu = context.platform == "cuda"
    context.recorder.expect([f"cuDNN, {length} tokens" for length in dense if is_gpu])
    context.recorder.expect(f"XLA, decode {batch} x {length}" for batch, length in decodes)
    context.recorder.expect(f"XLA, prefill {length}" for length in prompts)
    for length in dense if is_gpu else ():
        context.recorder.attempt(f"cuDNN, {length} tokens", partial(_cudnn, context, length))
    heads, most = layer_heads(context), max(*lengths, *prompts)
    num_tokens = max(batches) * most
    num_pages = heads.pool(num_tokens)[1]
    decode, prefill = public_decode(heads, "reference"), public_prefill(heads, "reference")
    programs = Programs(
        {("decode", batch): decode_program(heads, decode, batch, num_pages, most, num_repeats=1) for batch in batches}
        | {("prefill", each): prefill_program(heads, prefill, each, num_pages, "reference") for each in prompts},
        COMPILE_SHARE * context.recorder.left_s,
    )
    if programs.is_disturbed:
        context.recorder.note(DISTURBED)
    sharding = make_sharding(decoder(TINY if context.is_quick else LLAMA_8B), MeshShape())
    pool = random_pool(heads.pool(num_tokens), heads.dtype, sharding, context.seed)
    random = np.random.default_rng(context.seed)

    def measure_decode(batch: int, length: int) -> None:
        tables = scattered_tables(random, num_pages, batch, length, most)
        arguments = (queries(random, heads, batch), *pool, tables, jnp.full(batch, length, jnp.int32))
        program = programs["decode", batch]
        timing = time_calls(lambda: program(*arguments), jax.block_until_ready, budget_s=CELL_BUDGET_S)
        context.recorder.figure(
            "decode attention by XLA, one layer",
            batch=batch,
            context=length,
            us=timing.median_s * 1e6,
            spread=timing.spread,
            of_copy=context.share_of_copy(heads.decode_bytes(batch, length), timing.median_s),
        )

    def measure_prefill(length: int) -> None:
        tables = scattered_tables(random, num_pages, 1, length, length)
        q, program = queries(random, heads, length), programs["prefill", length]
        timing = time_calls(lambda: program(q, *pool, tables[0]), jax.block_until_ready, budget_s=CELL_BUDGET_S)
        _record_prefill(context, "XLA", length, timing.median_s)

    for batch, length in decodes:
        context.recorder.attempt(f"XLA, decode {batch} x {length}", partial(measure_decode, batch, length))
    for length in prompts:
        context.recorder.attempt(f"XLA, prefill {length}", partial(measure_prefill, length))


def _cudnn(context: Context, length: int) -> None:
    heads, random = layer_heads(context), np.random.default_rng(context.seed)
    q = queries(random, heads, length)[None]
    k, v = (
        jnp.asarray(random.standard_normal((1, length, heads.num_kv_heads, heads.dim), np.float32), heads.dtype)
        for _ in range(2)
    )
    attend = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"))
    timing = time_calls(lambda: attend(q, k, v), jax.block_until_ready, budget_s=CELL_BUDGET_S)
    _record_prefill(context, "cuDNN, not in pages", length, timing.median_s)


def _record_prefill(context: Context, by: str, length: int, seconds: float) -> None:
    flops = layer_heads(context).prefill_flops(length)
    context.recorder.figure(
        "prefill attention by others, one layer",
        by=by,
        tokens=length,
        ms=seconds * 1e3,
        tflop_per_s=flops / seconds / 1e12,
        of_matmul=context.share_of_matmul(flops, seconds),
    )
