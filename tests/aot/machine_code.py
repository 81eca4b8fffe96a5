"""What the assembler and the disassembler say of a kernel for GPUs."""

from __future__ import annotations

import importlib
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from tests.aot.devices import Target


@dataclass(frozen=True)
class MachineCode:
    """Of one program's kernels."""

    spilled_bytes: int
    instructions: str
    temp_bytes: int


def machine_code(target: Target, compiled: Callable[[], jax.stages.Compiled], dumps: Path) -> MachineCode:
    """Compiles, with the tools' reports written into the folder `dumps`. Skips where the tools are missing."""
    if not target.has_compiler:
        pytest.skip(f"{target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    toolkit = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    if not (toolkit / "bin" / "nvdisasm").exists():
        pytest.skip("nvidia-cuda-nvdisasm is not installed: nothing to read the machine code with (make kernels-check)")
    with pytest.MonkeyPatch.context() as patch:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # it sets the next variable when it is imported
        patch.setenv("MOSAIC_GPU_CUDA_ROOT", str(toolkit))
        patch.setenv("MOSAIC_GPU_DUMP_TO", str(dumps))
        for what in ("PTXAS", "SASS"):
            patch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
        memory = compiled().memory_analysis()
    report = "".join(file.read_text(errors="replace") for file in dumps.glob("*.ptxas"))
    code = "".join(file.read_text(errors="replace") for file in dumps.glob("*sass*"))
    spills = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills, "the assembler reported nothing"
    assert memory is not None
    return MachineCode(sum(int(count) for pair in spills for count in pair), code, memory.temp_size_in_bytes)
