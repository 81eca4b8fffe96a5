"""Compiles attention for one GPU, in a process of its own: `python -m tests.aot.other_gpus NAME [KV_DTYPE ...]`.

Prints a line of JSON. It is a process because Mosaic GPU (jax 0.11.2 and 0.12.0) assembles all kernels of a process for
the architecture of the first one.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve_kernels.paged_attention import Scoring, mixed_attention, ragged_layout
from jaxserve_kernels.paged_attention.gpu.splits import SLOT, make_cutting, make_segment_cutting, slot_bytes
from jaxserve_kernels.paged_attention.tuning import decode_tuning

from benchmarks.gpu.static import CONTEXTS, KEYS, KV_NUMBERS, compile_step
from jaxserve.tools.planning.devices import ACCELERATORS
from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import SM_86, Target
from tests.aot.machine_code import machine_code

BATCH, NUM_TOKENS, MAX_PAGES = 32, 509, 512
_POOL_SHAPE, _DIM = (8, 4096, 8, 16), 128
_COLUMNS, _STATS = 8, 128
"""Columns of the results of a part of a decode row, and its maxima and sums, in float32."""
_GROUP, _MIXED_TOKENS, _CHUNK_TILES = 4, 256, 256 // 8 + BATCH
"""Heads of a group, tokens of a mixed step, and tiles of 8 queries that there is room for."""
KV_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
KERNELS = {
    **{kv_dtype: (_DIM, kv_dtype) for kv_dtype in KV_DTYPES},
    **{f"{dim}-{kv_dtype}": (dim, kv_dtype) for dim in (80, 96) for kv_dtype in ("bfloat16", "float8_e4m3fn")},
}
"""Head dimensions and KV caches by name."""
CORNERS = ("int8", "80-float8_e4m3fn", "96-bfloat16")
"""Kernels that together have each head dimension and each KV cache."""


def _kernels(target: Target, dim: int, kv_dtype: str) -> dict[str, Any]:
    """Return what the assembler says of the launches of a mixed step at the shapes of Llama-3.1-8B, but for the head dimension."""
    (device,) = target.devices(1)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> jax.Array:
        layer, tables, lengths, starts, num_decode = rows
        ragged = ragged_layout(starts, num_decode, num_tokens=NUM_TOKENS)
        options: dict[str, Any] = {"scoring": Scoring(0.1), "backend": "mosaic_gpu_mma"}
        return mixed_attention(q, k, v, layer, tables, lengths, ragged, **options)

    def compiled() -> jax.stages.Compiled:
        pool = [array(*_POOL_SHAPE, dim, dtype=kv_dtype)] * 2
        rows = array(), array(BATCH, MAX_PAGES), array(BATCH), array(BATCH + 1), array()
        with jax.default_device(device):
            made = jax.jit(mixed).lower(array(NUM_TOKENS, 32, dim, dtype=jnp.bfloat16), *pool, *rows).compile()
        texts.append(made.as_text() or "")
        return made

    texts: list[str] = []

    with tempfile.TemporaryDirectory() as folder:
        code = machine_code(target, compiled, Path(folder))
    text = code.instructions
    return {
        "architectures": sorted(set(re.findall(r"\.target\s+sm_(\w+)", text))),
        "kernels": code.num_kernels,
        "launches": len(re.findall(r'custom_call_target="mosaic_gpu\w*"', texts[0])),
        "spilled_bytes": code.spilled_bytes,
        "registers": [int(count) for count in re.findall(r"Used (\d+) registers", text)],
        "instructions": [name for name in ("HMMA.16816", "LDGSTS", "HGMMA", "UTMALDG", "E4M3") if name in text],
    }


def _step(name: str, kind: str, kv_dtype: str) -> dict[str, Any]:
    """Return what a step of one layer does outside of graphs, and the bytes that the layer reads. With keys and values in
    8 bits it ends before the sampler, which is the same for all."""
    step = compile_step(
        BATCH,
        1,
        kind=kind,
        num_tokens=BATCH if kind == "decode" else _MIXED_TOKENS,
        device=name,
        kv_dtype=kv_dtype,
        is_sampled=kv_dtype == "bfloat16",
    )
    moved = sum(launch.read_bytes + launch.written_bytes for launch in step.layer(0))
    kv_bytes, shares = KV_NUMBERS * jnp.dtype(kv_dtype).itemsize, {}
    for context in CONTEXTS:
        absent = _absent_bytes(context, kv_dtype) + (_absent_chunk_bytes(kv_dtype) if kind == "mixed" else 0)
        read = moved - absent + BATCH * -(-context // KEYS) * KEYS * kv_bytes
        shares[context] = read / (step.weight_bytes + BATCH * context * kv_bytes)
    return {
        "outside_graphs": step.outside_graphs,
        "given_parts": kernels_given_parts(step.text),
        "loops": len(re.findall(r" while\(", step.text)),
        "kernels": len(re.findall(r'custom_call_target="mosaic_gpu\w*"', step.text)),
        "shares": shares,
    }


def _absent_bytes(context: int, kv_dtype: str) -> int:
    """Return the bytes of parts of rows that have memory and do not exist: the kernel writes, and the join reads, no such part."""
    _, _, num_kv_heads, page_size = _POOL_SHAPE
    tuning = decode_tuning("mma", _DIM, jnp.dtype(kv_dtype).itemsize)
    cutting = make_cutting(tuning, BATCH, num_kv_heads, tuning.programs, MAX_PAGES * page_size)
    rows = jnp.full(BATCH, -(-context // KEYS), jnp.int32)
    absent = cutting.num_parts - int(cutting.cut(jnp.zeros_like(rows), rows).num_parts[0])
    return 2 * absent * num_kv_heads * 4 * (_DIM * _COLUMNS + _STATS)


def _absent_chunk_bytes(kv_dtype: str) -> int:
    """Return the same for parts of chunks, if every tile that there is room for exists and none is cut."""
    tuning, num_kv_heads = decode_tuning("mma", _DIM, jnp.dtype(kv_dtype).itemsize), _POOL_SHAPE[2]
    own_slots = _MIXED_TOKENS * _GROUP // SLOT + _CHUNK_TILES
    slot = slot_bytes(num_kv_heads, _DIM)
    cutting = make_segment_cutting(_CHUNK_TILES, BATCH, own_slots, slot, tuning.long_split // KEYS)
    absent_parts = cutting.num_parts - _CHUNK_TILES
    return 2 * ((cutting.num_slots - own_slots) * slot + absent_parts * num_kv_heads * 4 * _STATS)


def main(name: str, *steps_of: str) -> int:
    """Print what was compiled for a device of the planner's table, or for `SM_86`: whole steps with some KV caches, or kernels:
    all of them for the compute capability 8.6, CORNERS for others."""
    if steps_of:
        found = {each: {kind: _step(name, kind, each) for kind in ("decode", "mixed")} for each in steps_of}
    else:
        target = SM_86 if name == SM_86.name else Target(ACCELERATORS[name])
        found = {each: _kernels(target, *KERNELS[each]) for each in (KERNELS if target == SM_86 else CORNERS)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
