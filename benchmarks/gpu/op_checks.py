"""Checks of the ops beside attention: KV writes, rotation, matmuls."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.block_kinds import BLOCK_KINDS, pack_tiles
from jaxserve_kernels.block_matmul import block_matmul, dequantize_tiles
from jaxserve_kernels.block_matmul.cases import random_blocks
from jaxserve_kernels.kv_write import KVScales, kv_write
from jaxserve_kernels.matmul import matmul
from jaxserve_kernels.matmul.cases import Case, error, operands
from jaxserve_kernels.nvfp4 import TwoLevelScales
from jaxserve_kernels.nvfp4 import matmul as nvfp4_matmul
from jaxserve_kernels.ops import as_arrays, ops
from jaxserve_kernels.rope import Rotation, rotate

from benchmarks.gpu import oracle
from benchmarks.gpu.crew import Bench
from benchmarks.gpu.matmul_programs import candidates, skinny_matmul

LAYER, NUM_LAYERS = 1, 2
MATMUL_TOLERANCES = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 1e-3}
"""Matmuls are accumulated and returned in float32, whatever the operands are. TF32 would not pass for float32."""
BLOCK_TOLERANCE = 1e-2
"""XLA rounds weights to bfloat16, kernels do not."""
DYNAMIC_TOLERANCES = {"int8": 3e-3, "fp8": 1e-2}
"""A value on the border of two steps may be rounded to either; tensor cores add products of fp8 with fewer bits."""


def check_case(op_name: str, case: Any, backend: Backend, bench: Bench) -> None:
    """Check a case of an op as the server would compute it; 1 is the largest allowed error."""
    op = ops()[op_name]
    given = op.operands(case, bench.seed)
    arguments = as_arrays(given)
    found = bench.compile(lambda given: op.run(case, given, backend), arguments)(arguments)
    worst = op.error(case, given, jax.tree.map(np.asarray, found))
    bench.recorder.check(f"{backend}: {op_name} {case}", passed=worst <= 1, error=worst, tolerance=1.0)


def check_write(dtype: str, pool_dtype: str, count: int, bench: Bench) -> None:
    """Named slots change and nothing else does, in the same buffers; 8-bit pools take numbers beyond their range."""
    random, size = bench.random, (NUM_LAYERS, 64, 8, 16, 128)
    k, v = (random.standard_normal(size, np.float32).astype(_dtype(pool_dtype)) for _ in range(2))
    new_k, new_v = (_new(random, (count, *size[2:3], size[4]), dtype) for _ in range(2))
    # Powers of two: dividing by them rounds nothing.
    scales = [2.0 ** random.integers(-3, 3, size[2]).astype(np.float32) for _ in range(2)]
    has_scales = k.dtype.itemsize == 1
    places = random.permutation((size[1] - 1) * size[3])[:count] + size[3]  # none on the null page
    where, slots = (places // size[3]).astype(np.int32), (places % size[3]).astype(np.int32)

    def write(
        k: jax.Array, v: jax.Array, new_k: jax.Array, new_v: jax.Array, pages: jax.Array, slots: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        given = KVScales(*map(jnp.asarray, scales)) if has_scales else None
        return kv_write(k, v, jnp.int32(LAYER), new_k, new_v, pages, slots, scales=given)

    arguments = tuple(map(jnp.array, (k, v, new_k, new_v, where, slots)))  # copies: two of them are donated
    compiled = bench.compile(write, *arguments, donate=(0, 1))
    memory = compiled.memory_analysis()
    assert memory is not None, "every backend this runs on tells its memory"
    found = [np.asarray(array) for array in compiled(*arguments)]
    for pool, new, scale in ((k, new_k, scales[0]), (v, new_v, scales[1])):
        stored = oracle.stored(new / scale[:, None] if has_scales else new, pool.dtype)
        pool[LAYER, where, :, slots] = stored
    is_equal = all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(found, (k, v), strict=True))
    name = f"kv_write, {count} tokens, {dtype} into {pool_dtype}"
    bench.recorder.check(f"{name}: exact", passed=is_equal)
    is_in_place = memory.alias_size_in_bytes >= k.nbytes + v.nbytes and memory.temp_size_in_bytes < k.nbytes // 2
    bench.recorder.check(
        f"{name}: in place",
        passed=is_in_place,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


def _new(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return keys or values in which each token has one large number and one NaN."""
    new = random.standard_normal(shape, np.float32)
    new[..., 3], new[:, 0, 5] = 5e3, np.nan
    return new.astype(_dtype(dtype))


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def check_rotate(dtype: str, bench: Bench) -> None:
    x = bench.random.standard_normal((50, 8, 128), np.float32).astype(_dtype(dtype))
    angles = bench.random.uniform(0, 8192, (50, 64)).astype(np.float32)
    cos, sin = (jnp.asarray(of(angles.astype(np.float64)), jnp.float32) for of in (np.cos, np.sin))
    arguments = (jnp.asarray(x), Rotation(cos, sin))
    found = np.asarray(bench.compile(rotate, *arguments)(*arguments))
    compare(bench, f"rotate, {dtype}", found, oracle.rotate(x, angles.astype(np.float64)), oracle.TOLERANCES[dtype])


def check_matmul(kind: str, dtype: str, count: int, bench: Bench) -> None:
    random, (num_in, num_out) = bench.random, (1024, 768)
    x = random.standard_normal((count, num_in), np.float32).astype(_dtype(dtype))
    arrays: tuple[np.ndarray, ...]
    if kind == "plain":
        weight = random.standard_normal((num_out, num_in), np.float32).astype(_dtype(dtype))
        arrays, expected = (x, weight), x.astype(np.float64) @ weight.astype(np.float64).T
    else:
        is_int8 = kind.startswith("int8")
        wide = (
            random.integers(-127, 128, (num_out, num_in)) if is_int8 else random.uniform(-448, 448, (num_out, num_in))
        )
        weight = wide.astype(np.int8 if is_int8 else ml_dtypes.float8_e4m3fn)
        scales = random.uniform(0.001, 0.01, num_out).astype(np.float32)
        rows = oracle.quantise(x, weight.dtype) if kind in DYNAMIC_TOLERANCES else x.astype(np.float64)
        arrays, expected = (x, weight, scales), rows @ (weight.astype(np.float64).T * scales)
    arguments = tuple(map(jnp.asarray, arrays))
    found = np.asarray(bench.compile(partial(matmul, dynamic=kind in DYNAMIC_TOLERANCES), *arguments)(*arguments))
    tolerance = DYNAMIC_TOLERANCES.get(kind, MATMUL_TOLERANCES[dtype])
    compare(bench, f"matmul, {kind}, {count} x {num_in} x {num_out}, {dtype}", found, expected, tolerance)


def check_grouped(backend: Backend, weights: str, dtype: str, count: int, bench: Bench) -> None:
    """Weights in int4 or e4m3 with a scale for each output and 128 inputs: by the kernel where `backend` has one."""
    random, (num_in, num_out) = bench.random, (1024, 768)
    x = random.standard_normal((count, num_in), np.float32).astype(_dtype(dtype))
    is_int4 = weights == "int4"
    numbers = random.integers(-8, 8, (num_out, num_in)).astype(np.int8 if is_int4 else _dtype(weights))
    scales = random.uniform(-0.1, 0.1, (num_in // 128, num_out)).astype(_dtype(dtype) if is_int4 else np.float32)
    wide = numbers.astype(np.float64) * scales.astype(np.float64).T.repeat(128, axis=1)
    # As the server stores them: int4 in bytes on CPUs.
    is_packed = is_int4 and jax.default_backend() != "cpu"
    weight = jnp.asarray(numbers.astype(ml_dtypes.int4) if is_packed else numbers)
    arguments = (jnp.asarray(x), weight, jnp.asarray(scales))
    found = np.asarray(bench.compile(partial(matmul, backend=backend), *arguments)(*arguments))
    name = f"{backend}: matmul, {weights} weights in groups, {count} x {num_in} x {num_out}, {dtype}"
    compare(bench, name, found, x.astype(np.float64) @ wide.T, MATMUL_TOLERANCES[dtype])


def check_nvfp4(backend: Backend, dtype: str, count: int, bench: Bench) -> None:
    """Check weights in NVFP4 that have every number and scale but NaN: by the kernel where `backend` has one."""
    random, (num_in, num_out) = bench.random, (1024, 768)
    x = random.standard_normal((count, num_in), np.float32).astype(_dtype(dtype))
    codes = random.integers(0, 16, (num_out, num_in)).astype(np.uint8)
    blocks = random.integers(0, 127, (num_in // 16, num_out)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    of_matrix = random.uniform(0.001, 0.01, (2, num_out)).astype(np.float32)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * blocks.T.astype(np.float64).repeat(16, axis=1)
    wide = numbers * (of_matrix[0].astype(np.float64) / of_matrix[1])[:, None]
    scales = TwoLevelScales(jnp.asarray(blocks), jnp.asarray(of_matrix))
    arguments = (jnp.asarray(x), jnp.asarray(codes[:, 0::2] | codes[:, 1::2] << 4), scales)
    found = np.asarray(bench.compile(partial(nvfp4_matmul, backend=backend), *arguments)(*arguments))
    name = f"{backend}: matmul, NVFP4 weights, {count} x {num_in} x {num_out}, {dtype}"
    compare(bench, name, found, x.astype(np.float64) @ wide.T, MATMUL_TOLERANCES[dtype])


def check_blocks(backend: Backend, name: str, count: int, bench: Bench) -> None:
    """Check GGUF blocks of any codes, in bfloat16: by the kernel where `backend` has one for the type."""
    kind, (num_in, num_out) = BLOCK_KINDS[name], (1024, 768)
    x = bench.random.standard_normal((count, num_in), np.float32).astype(_dtype("bfloat16"))
    tiles = jnp.asarray(pack_tiles(kind, random_blocks(kind, bench.random, num_out, num_in // kind.num_inputs)))
    wide = np.asarray(dequantize_tiles(kind, tiles), np.float64)
    arguments = (jnp.asarray(x), tiles)
    found = np.asarray(bench.compile(partial(block_matmul, kind=kind, backend=backend), *arguments)(*arguments))
    expected = x.astype(np.float64) @ wide.T
    compare(
        bench, f"{backend}: matmul, {name} blocks, {count} x {num_in} x {num_out}", found, expected, BLOCK_TOLERANCE
    )


def check_skinny(case: Case, bench: Bench) -> None:
    """Our kernel, in all sizes that are tried when it is tuned."""
    given = operands(case, bench.seed)
    x, weight, scales = map(jnp.asarray, given)
    for tuning in candidates(len(x), ((weight.shape[0], weight.shape[1]),)):
        compiled = bench.compile(partial(skinny_matmul, tuning, is_dynamic=False), x, weight, scales)
        worst = error(case, given, compiled(x, weight, scales))
        name = f"matmul by our kernel, {case}, {tuning}"
        bench.recorder.check(name, passed=worst <= 1, error=worst, tolerance=1.0)
        bench.tell("prepares")


def compare(bench: Bench, name: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    error = oracle.vector_error(found, expected)
    bench.recorder.check(name, passed=error <= tolerance, error=error, tolerance=tolerance)
