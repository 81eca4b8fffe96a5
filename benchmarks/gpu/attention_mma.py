"""Part `attention` by the kernel on `mma.sync`, on request: other GPUs than Hoppers take it, and Hoppers have its instructions as well."""

from __future__ import annotations

from benchmarks.gpu import attention
from benchmarks.gpu.context import Context
from benchmarks.gpu.device import first_device
from jaxserve.runner.backend import chip_of, pallas_backend


def run(context: Context) -> None:
    """Measure every cell."""
    if pallas_backend(chip_of(first_device(context))) is None:
        context.recorder.note("this device does not have the instructions of the kernel")
        return
    attention.run(context, "mosaic_gpu_mma")
