"""Reports of the assembler and the disassembler on a kernel for GPUs."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from tests.aot.devices import Target


@dataclass(frozen=True)
class MachineCode:
    """The code of one program's kernels: those that no earlier program of this process had."""

    num_kernels: int
    spilled_bytes: int
    instructions: str
    temp_bytes: int


def machine_code(target: Target, compiled: Callable[[], jax.stages.Compiled], dumps: Path) -> MachineCode:
    """Compiles, with the tools' reports kept in the folder `dumps`. Skips where the tools are missing.

    Mosaic would write them there by itself, but with 180 MB of what its passes did beside them, for half the time.
    """
    if not target.has_compiler:
        pytest.skip(f"{target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    toolkit = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    if not (toolkit / "bin" / "nvdisasm").exists():
        pytest.skip("nvidia-cuda-nvdisasm is not installed: nothing to read the machine code with (make kernels-check)")
    with pytest.MonkeyPatch.context() as patch:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # it sets the next variable when it is imported
        patch.setenv("MOSAIC_GPU_CUDA_ROOT", str(toolkit))
        for what in ("PTXAS", "SASS"):
            patch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
        with _output_to(dumps / "report"):
            memory = compiled().memory_analysis()
    report = (dumps / "report").read_text(errors="replace")
    spills = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills, "the assembler reported nothing"
    assert memory is not None
    spilled_bytes = sum(int(count) for pair in spills for count in pair)
    return MachineCode(len(spills), spilled_bytes, report, memory.temp_size_in_bytes)


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Send everything that this process writes to its standard output to `file`."""
    sys.stdout.flush()
    before = os.dup(1)
    try:
        with file.open("wb") as target:
            os.dup2(target.fileno(), 1)
        yield
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(before, 1)
        os.close(before)
