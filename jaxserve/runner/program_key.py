"""Cache keys of compiled programs: parts of the host it was compiled on and for, and of the program itself.

The host's parts have names, so that a cache that was filled elsewhere can report what differs. Each of them is part of
every key: a program that is found under its key was compiled by this source, these versions and flags, for this kind of
device and processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import jax
import jaxserve_kernels
from jaxserve_kernels.devices import multiprocessors

import jaxserve
from jaxserve.runner.compiler_options import PROGRAM_OPTIONS
from jaxserve.runner.host.cores import num_threads

_JAX_SETTINGS = (
    "jax_compiler_enable_remat_pass",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_high_dynamic_range_gumbel",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_pallas_use_mosaic_gpu",
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
    if device.platform == "gpu":  # kernels have as many thread blocks; parts of a GPU have fewer than the whole
        parts["multiprocessors"] = str(multiprocessors(0))
    if options := PROGRAM_OPTIONS.get(device.platform):
        parts["compiler options"] = str(dict(options))
    if device.platform == "cpu":  # XLA cuts loops into as many parts as it has threads
        parts["cores"] = str(num_threads())
    return parts


def process_key_parts() -> dict[str, str]:
    """Return the part of a key that differs between the processes of one program; empty if there is one process."""
    count = jax.process_count()
    return {} if count == 1 else {"process": f"{jax.process_index()} of {count}"}


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


STEPS: Final = ("runner/steps.py", "runner/embedding.py", "runner/speculation/step.py", "runner/kv_scales/step.py")
"""The step functions. They may reach no traced code but by their imports."""
_SUFFIXES: Final = (".py", ".cc", ".h", ".json")
_IMPORT: Final = re.compile(
    rb"^[ \t]*(?:from jaxserve(?:\.([\w.]+))? import (\([^)]*\)|.*)|import jaxserve\.([\w.]+))", re.M
)
_SCANNER: Final = re.compile(rb"^(?:from|import) pkgutil", re.M)
_DOCSTRING: Final = re.compile(rb'^([ \t]*)"""(?s:.*?)"""$', re.M)


@cache
def source_hash() -> str:
    """Return 16 hex digits over the source of everything that can change what a program computes.

    It is every module that the step functions import, directly or not, and the whole kernel package. Modules that are
    found by scanning a folder count as imported by the module that scans. Comments, docstrings and blank lines do not
    count.
    """
    digest = hashlib.sha256()
    root, kernels = Path(jaxserve.__file__).parent, Path(jaxserve_kernels.__file__).parent
    for base, files in ((root, traced_files(root)), (kernels, kernels.rglob("*"))):
        for name, file in sorted((str(file), file) for file in files if file.suffix in _SUFFIXES):
            digest.update(name.removeprefix(str(base)).encode() + b"\0")
            digest.update(without_comments(file.read_bytes()) if file.suffix == ".py" else file.read_bytes())
    return digest.hexdigest()[:16]


def traced_files(root: Path) -> set[Path]:
    """Return the files below `root`, the folder of jaxserve, that the step functions import, directly or not."""
    found = {root / "__init__.py"}  # it imports the public names of upper packages when they are asked for
    waiting = [root / name for name in STEPS]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        source = file.read_bytes()
        waiting += _imported(root, source)
        waiting.append(file.parent / "__init__.py")
        if _SCANNER.search(source):
            waiting += file.parent.rglob("*.py")
    return found - {root / "__init__.py"}


def _imported(root: Path, source: bytes) -> Iterator[Path]:
    for base, names, whole in _IMPORT.findall(source):
        path = root.joinpath(*(base or whole).decode().split("."))
        module = path.with_suffix(".py") if path != root else path
        if module.is_file():
            yield module
            continue
        yield path / "__init__.py"
        for name in re.findall(r"\w+", names.decode()):
            yield path / f"{name}.py"
            yield path / name / "__init__.py"


def without_comments(source: bytes) -> bytes:
    """Return Python source with `...` for docstrings, and without comments and blank lines.

    Expects source as ruff formats it. `tests/unit/runner/test_traced_source.py` checks it on all of ours.
    """
    lines = _DOCSTRING.sub(rb"\1...", source).split(b"\n")
    return b"\n".join(line.partition(b"  # ")[0] for line in lines if line and not line.lstrip().startswith(b"#"))
