"""Compiles attention on `tcgen05` for a B200 or a B300, in a process of its own: `python -m tests.aot.blackwell b200|sm_103`.

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

from benchmarks.gpu.static import compile_step
from tests.aot.devices import B200, SM_103, Target
from tests.aot.machine_code import MachineCode, machine_code

BATCH, NUM_TOKENS, MAX_PAGES, NUM_PAGES, NUM_LAYERS, NUM_KV_HEADS = 32, 509, 512, 4096, 8, 8
LAUNCHES: dict[str, dict[str, Any]] = {
    "usual": {},
    "64": {"dim": 64, "dtype": "float16"},
    "every option": {"scoring": Scoring(0.1, 50.0, 1024), "has_sinks": True, "page_size": 128},
    "every option, 64": {"scoring": Scoring(0.1, 50.0, 1024), "has_sinks": True, "dim": 64},
    "odd heads": {"num_heads": 7 * NUM_KV_HEADS, "page_size": 64},
    "a head": {"num_heads": NUM_KV_HEADS, "dtype": "float16"},
}
"""Mixed steps by name: what differs from the shapes of Llama-3.1-8B."""
LAUNCHES_OF_B300 = ("usual", "every option, 64")
"""Launches with the fewest and the most options. What comes before the assembler is as for a B200."""


def _compiled(
    target: Target,
    *,
    dim: int = 128,
    dtype: str = "bfloat16",
    num_heads: int = 4 * NUM_KV_HEADS,
    page_size: int = 16,
    scoring: Scoring = Scoring(0.1),  # noqa: B008  (immutable)
    has_sinks: bool = False,
) -> MachineCode:
    (device,) = target.devices(1)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> jax.Array:
        layer, tables, lengths, starts, num_decode, sinks = rows
        options: dict[str, Any] = {"scoring": scoring, "backend": "mosaic_gpu_tcgen05"}
        ragged = ragged_layout(starts, num_decode, num_tokens=NUM_TOKENS, backend=options["backend"])
        return mixed_attention(q, k, v, layer, tables, lengths, ragged, sinks=sinks if has_sinks else None, **options)

    def compiled() -> jax.stages.Compiled:
        pool = [array(NUM_LAYERS, NUM_PAGES, NUM_KV_HEADS, page_size, dim, dtype=dtype)] * 2
        rows = (
            array(),
            array(BATCH, MAX_PAGES),
            array(BATCH),
            array(BATCH + 1),
            array(),
            array(num_heads, dtype=jnp.float32),
        )
        with jax.default_device(device):
            return jax.jit(mixed).lower(array(NUM_TOKENS, num_heads, dim, dtype=dtype), *pool, *rows).compile()

    with tempfile.TemporaryDirectory() as folder:
        return machine_code(target, compiled, Path(folder))


def _of_step(kind: str) -> dict[str, Any]:
    """Return what a step of one layer of Llama-3.1-8B does outside of graphs, and its kernels."""
    step = compile_step(BATCH, 1, kind=kind, num_tokens=256, device=B200.name, is_sampled=False)
    return {
        "outside_graphs": step.outside_graphs,
        "loops": len(re.findall(r" while\(", step.text)),
        "kernels": len(re.findall(r'custom_call_target="mosaic_gpu\w*"', step.text)),
    }


def main(name: str) -> int:
    """Print the machine code of every launch, of two for a B300, and for a B200 a mixed step up to its sampler."""
    found: dict[str, Any] = {}
    target = SM_103 if name == SM_103.name else B200
    for launch in LAUNCHES if target is B200 else LAUNCHES_OF_B300:
        code = _compiled(target, **LAUNCHES[launch])
        text = code.instructions
        found[launch] = {
            "architectures": sorted(set(re.findall(r"\.target\s+sm_(\w+)", text))),
            "kernels": code.num_kernels,
            "spilled_bytes": code.spilled_bytes,
            "registers": [int(count) for count in re.findall(r"Used (\d+) registers", text)],
            "instructions": [each for each in ("UTCHMMA", "UTMALDG", "LDTM", "STTM", "UTCBAR") if each in text],
        }
    if target is B200:
        found["step"] = _of_step("mixed")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
