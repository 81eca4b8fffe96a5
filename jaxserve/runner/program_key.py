"""What a compiled program depends on: the host it was compiled on and for, and the program itself.

The host half is a table of named facts, so that a cache that was filled elsewhere can say what differs. Every
fact is part of every key: a program whose key is found was compiled by this source, these versions and flags, for
this kind of device and processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax
import jaxserve_kernels

import jaxserve

_UNTRACED_ROOMS = (
    *("apis", "checkpoint", "cli", "engine", "executor", "frontend", "http", "ipc", "runtime", "tokenizer", "tools"),
)
"""Rooms whose source cannot change what a program computes. All others can, or might."""
_SOURCE_SUFFIXES = (".py", ".cc", ".h", ".json")
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_high_dynamic_range_gumbel",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
"""Settings of JAX, also set by environment variables, that change what is traced or how it is compiled."""

_PROCESSOR_LINES = ("vendor_id", "cpu family", "model\t", "flags", "CPU implementer", "CPU part", "Features")
"""Of /proc/cpuinfo, on x86 and on ARM."""


def host_key_parts() -> dict[str, str]:
    """What every program of this process depends on, by name."""
    device = jax.devices()[0]
    settings = jax.config.values
    facts = {
        "jaxserve": jaxserve.__version__,
        "jaxserve source": source_hash(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "platform": device.platform,
        "device kind": device.device_kind,
        "runtime": str(device.client.platform_version),
        "processor": _processor(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "LIBTPU_INIT_ARGS": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "jax settings": " ".join(f"{name}={settings[name]}" for name in _JAX_SETTINGS if name in settings),
    }
    if device.platform == "cpu":  # XLA cuts loops into as many parts as there are cores
        facts["cores"] = str(len(os.sched_getaffinity(0)))
    return facts


def program_key(facts: Mapping[str, str], *parts: object) -> str:
    """The name of a program that depends on `facts` of the host and on `parts`."""
    digest = hashlib.sha256()
    for part in (*sorted(facts.items()), *parts):
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


@cache
def source_hash() -> str:
    """Of everything that can change what a program computes."""
    digest = hashlib.sha256()
    ours, kernels = Path(jaxserve.__file__).parent, Path(jaxserve_kernels.__file__).parent
    for root in (ours, kernels):
        for file in sorted(root.rglob("*")):
            inside = file.relative_to(root)
            is_traced = root is kernels or inside.parts[0] not in _UNTRACED_ROOMS
            if is_traced and file.suffix in _SOURCE_SUFFIXES:
                digest.update(f"{inside}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _processor() -> str:
    """What the host's processor can execute: XLA compiles host code for exactly that, also beside an accelerator."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            lines = {" ".join(line.split()) for line in file if line.startswith(_PROCESSOR_LINES)}
    except OSError:
        return platform.processor()
    return "; ".join(sorted(lines))
