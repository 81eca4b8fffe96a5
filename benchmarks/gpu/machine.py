"""Part 1: what runs here, and what the device does at most: a copy of memory, a large matmul."""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import partial
from importlib import metadata

import jax
import jax.numpy as jnp

from benchmarks.gpu.bounds import TABLE
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from benchmarks.gpu.timing import time_calls
from benchmarks.processes import describe_machine

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "flax", "torch", "transformers", "triton")


def run(context: Context) -> None:
    sizes = (128, 256) if context.is_quick else (4096, 8192, 16384)
    context.recorder.expect(["device", "copy", *(f"matmul {size}" for size in sizes), "versions"])
    context.recorder.attempt("device", partial(record_device, context))
    context.recorder.attempt("copy", partial(measure_copy, context))
    for size in sizes:
        context.recorder.attempt(f"matmul {size}", partial(measure_matmul, context, size))
    context.recorder.attempt("versions", partial(record_versions, context))


def record_device(context: Context) -> None:
    device = first_device(context)
    stats = device.memory_stats() or {}
    context.recorder.figure(
        "device",
        kind=device.device_kind,
        platform=device.platform,
        multiprocessors=getattr(device, "core_count", None),
        runtime=" ".join(device.client.platform_version.split()),
        jax_memory_gib=stats["bytes_limit"] / 2**30 if "bytes_limit" in stats else None,
        driver=driver(),
    )


def record_versions(context: Context) -> None:
    for name in PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        context.recorder.figure("versions", package=name, version=version)
    context.recorder.figure("versions", package="python", version=platform.python_version())
    context.recorder.figure("host", **describe_machine())


def driver() -> str | None:
    """The GPU and its driver as the driver's own tool tells them."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() or None


def measure_copy(context: Context) -> None:
    """Every word is read, changed and written elsewhere; and only read."""
    num_bytes = 8 << 20 if context.is_quick else 4 << 30
    words = jax.jit(lambda: jax.random.bits(jax.random.key(context.seed), (num_bytes // 4,), jnp.uint32))()
    change = jax.jit(lambda words: words ^ jnp.uint32(1))
    add = jax.jit(lambda words: jnp.sum(words, dtype=jnp.uint32))
    copied = time_calls(lambda: change(words), jax.block_until_ready, budget_s=1.0)
    read = time_calls(lambda: add(words), jax.block_until_ready, budget_s=1.0)
    for name, timing, moved in (("copy", copied, 2 * num_bytes), ("read", read, num_bytes)):
        context.recorder.figure(
            TABLE,
            bound=name,
            size=f"{num_bytes >> 20} MiB",
            rate=moved / timing.median_s / 1e9,
            unit="GB/s",
            best=moved / timing.least_s / 1e9,
            ms=timing.median_s * 1e3,
        )


def measure_matmul(context: Context, size: int) -> None:
    """Random data: zeros are multiplied faster, because they switch fewer transistors."""
    dtype = jnp.bfloat16 if context.platform == "cuda" else jnp.float32
    left, right = jax.random.normal(jax.random.key(context.seed), (2, size, size), dtype)
    multiply = jax.jit(jnp.matmul)
    timing = time_calls(lambda: multiply(left, right), jax.block_until_ready, budget_s=1.0)
    flops = 2 * size**3
    context.recorder.figure(
        TABLE,
        bound="matmul",
        size=f"{size}^3 {jnp.dtype(dtype).name}",
        rate=flops / timing.median_s / 1e12,
        unit="TFLOP/s",
        best=flops / timing.least_s / 1e12,
        ms=timing.median_s * 1e3,
    )
