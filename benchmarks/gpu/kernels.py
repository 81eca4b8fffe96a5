"""Part 2: every op of `jaxserve_kernels` on the device, on fresh random inputs, against numpy in float64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from functools import partial

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.block_kinds import BLOCK_KINDS
from jaxserve_kernels.matmul.cases import CASES, ROUNDED_CASES
from jaxserve_kernels.ops import ops
from jaxserve_kernels.paged_attention.cases import Case

from benchmarks.gpu.attention_checks import check_write_and_attend
from benchmarks.gpu.backends import computes, has_kernel, op_backends, why_no_kernels
from benchmarks.gpu.context import Context
from benchmarks.gpu.crew import Check, run_all
from benchmarks.gpu.device import first_device
from benchmarks.gpu.expert_checks import CASES as EXPERTS
from benchmarks.gpu.expert_checks import check_experts, check_sums
from benchmarks.gpu.op_checks import (
    check_blocks,
    check_case,
    check_grouped,
    check_matmul,
    check_nvfp4,
    check_rotate,
    check_skinny,
    check_write,
)
from benchmarks.gpu.shapes import LLAMA_8B, decoder

MOST_PROCESSES = 16
DTYPES = ("bfloat16", "float32", "float16")
POOLS = (*((dtype, dtype) for dtype in DTYPES), ("bfloat16", "float8_e4m3fn"), ("float16", "int8"))
"""Types of what is written, and of the pool."""
WEIGHTS = ("plain", "int8 weights", "int8", "fp8 weights", "fp8")
END_TO_END = (
    Case((1, 1, 1), (5, 77, 1), num_heads=8, dim=128),
    Case((1, 9, 70, 0), (40, 9, 133, 0), padding=3, dim=128),
    Case((1, 40), (30, 90), num_heads=8, kv_dtype="float8_e4m3fn"),
    Case((1, 1), (64, 65), kv_dtype="int8", dtype="float16"),
)
"""Decode and mixed steps that write what they attend to, with and without scales."""


def run(context: Context) -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes share the device's memory
    first_device(context)
    reason = why_no_kernels(decoder(LLAMA_8B))
    if reason is not None:
        context.recorder.note(f"the Pallas kernels are not checked here: {reason}")
    num_processes = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) - 1))
    run_all(context, __name__, list(checks(context)), num_processes)


def checks(context: Context) -> Mapping[str, Check]:
    """Return every check by name: first those of the kernels that a server takes, then of other backends, of ops that all backends
    share, and of the reference."""
    is_quick = context.is_quick
    dtypes = DTYPES[1:2] if is_quick else DTYPES
    reference, *kernels = op_backends(context, decoder(LLAMA_8B))
    found: dict[str, Check] = {}
    for backend in reversed(kernels):
        found |= _backend_checks(backend, dtypes, is_quick=is_quick)
    if "mosaic_gpu" in kernels:
        for case in (*CASES, *ROUNDED_CASES):
            found[f"mosaic_gpu: matmul by our kernel {case}"] = partial(check_skinny, case)
    for (dtype, pool), count in itertools.product(POOLS[4:] if is_quick else POOLS, (1, 300)):
        found[f"kv_write {count} {dtype} into {pool}"] = partial(check_write, dtype, pool, count)
    for dtype in dtypes:
        found[f"rotate {dtype}"] = partial(check_rotate, dtype)
    for kind, count, dtype in itertools.product(WEIGHTS, (1, 7, 64), dtypes[:2]):
        found[f"matmul {kind} {count} {dtype}"] = partial(check_matmul, kind, dtype, count)
    return found | _backend_checks(reference, dtypes, is_quick=is_quick, has_slow=not kernels)


def _backend_checks(
    backend: Backend, dtypes: Sequence[str], *, is_quick: bool, has_slow: bool = True
) -> dict[str, Check]:
    """Return the checks of everything that a backend computes in its own way. has_slow: False leaves out the cases that need not run on
    every device."""
    found: dict[str, Check] = {}
    for case in (case for case in (END_TO_END[2:] if is_quick else END_TO_END) if has_kernel(backend, case)):
        found[f"{backend}: write and attend, {case}"] = partial(check_write_and_attend, case, backend)
    for name, op in ops().items():
        cases = [case for case in op.CASES if computes(backend, name) and has_kernel(backend, case)]
        for case in [case for case in cases if (has_slow and not is_quick) or case not in op.SLOW]:
            found[f"{backend}: {name} {case}"] = partial(check_case, name, case, backend)
    if not computes(backend, "matmul"):
        return found
    for weights, count, dtype in itertools.product(("int4", "float8_e4m3fn"), (1, 7, 64), dtypes[:2]):
        name = f"{backend}: matmul {weights} weights in groups {count} {dtype}"
        found[name] = partial(check_grouped, backend, weights, dtype, count)
    for count, dtype in itertools.product((1, 7, 64), dtypes[:2]):
        found[f"{backend}: matmul NVFP4 weights {count} {dtype}"] = partial(check_nvfp4, backend, dtype, count)
    for kind in BLOCK_KINDS:
        found[f"{backend}: matmul {kind} blocks"] = partial(check_blocks, backend, kind, 7)
    for experts in EXPERTS[2:5:2] if is_quick else EXPERTS:
        found[f"{backend}: {experts}"] = partial(check_experts, experts, backend)
        if experts.weights in ("int8", "float8_e4m3fn"):
            found[f"{backend}: {experts}, rounded"] = partial(check_experts, experts, backend, dynamic=True)
    found[f"{backend}: sums of experts in e4m3"] = partial(check_sums, backend)
    return found
