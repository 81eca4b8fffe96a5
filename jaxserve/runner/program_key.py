"""Cache keys of compiled programs: parts of the host it was compiled on and for, and of the program itself.

The host's parts have names, so that a cache that was filled elsewhere can report what differs. Each of them is part of
every key: a program that is found under its key was compiled by this source, these versions and flags, for this kind of
device and processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

import jax

import jaxserve
from jaxserve.runner.traced_source import source_hash

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
"""Lines of /proc/cpuinfo, on x86 and on ARM, that identify a kind of processor."""


def host_key_parts() -> dict[str, str]:
    """Return the parts that every key of this process has, by name."""
    device = jax.devices()[0]
    settings = jax.config.values
    parts = {
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
        parts["cores"] = str(len(os.sched_getaffinity(0)))
    return parts


def program_key(host: Mapping[str, str], *parts: object) -> str:
    """Return the key of a program that depends on the named parts of the host and on `parts`: 64 hex digits."""
    digest = hashlib.sha256()
    for part in (*sorted(host.items()), *parts):
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()


@cache
def _processor() -> str:
    """Return the instruction sets of the processor: XLA compiles host code for exactly these, also beside an accelerator."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            lines = {" ".join(line.split()) for line in file if line.startswith(_PROCESSOR_LINES)}
    except OSError:
        return platform.processor()
    return "; ".join(sorted(lines))
