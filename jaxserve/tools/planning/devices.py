"""Devices to plan for, as data: memory, bandwidth and arithmetic of one device, and where the numbers are from.

Rates are published peaks without sparsity, so times made from them are lower bounds. Memory is what
the runtime would report, not the nominal size: it decides the number of KV pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from jaxserve.runner.host.cores import num_cores
from jaxserve.runner.host.memory import available_bytes
from jaxserve.types import GPU_SHARE

Platform = Literal["cpu", "gpu", "tpu"]

_GIB = 1 << 30
_SECONDS_EACH = 0.5
_VECTOR_SHAPE = (8192, 8192)  # 256 MiB: more than the caches of most machines
_SQUARE = 1536


@dataclass(frozen=True, slots=True)
class Rates:
    """Memory bandwidth and matmul rates of one device."""

    bytes_per_s: float
    bfloat16_flops: float
    float32_flops: float
    """Rate of matmuls in full float32 precision, which float32 activations use."""
    int8_ops: float
    fp8_flops: float
    """Equal to the bfloat16 rate if 8-bit floats are upcast first."""
    source: str

    @classmethod
    def alike(cls, bytes_per_s: float, flops: float, source: str) -> Rates:
        """Return rates that are equal in every dtype, for a device without other figures."""
        return cls(bytes_per_s, flops, flops, flops, flops, source)

    def of(self, arithmetic: str) -> float:
        """Return the operations per second of matmuls in a dtype; one without a rate of its own is as fast as bfloat16."""
        rates = {
            "float32": self.float32_flops,
            "bfloat16": self.bfloat16_flops,
            "int8": self.int8_ops,
            "fp8": self.fp8_flops,
        }
        return rates.get(arithmetic, self.bfloat16_flops)


@dataclass(frozen=True, slots=True)
class CudaChip:
    """Properties of a GPU that the CUDA compiler needs besides memory and bandwidth."""

    capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    threads_per_core: int = 2048


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device. `rates` is None if no figures are published (CPUs: measured when a plan is made)."""

    name: str
    title: str
    platform: Platform
    memory_bytes: int
    runtime_share: float
    """Fraction of `memory_bytes` that the runtime allocates from."""
    most_per_host: int
    """Most devices of one host."""
    link_bytes_per_s: float
    """Published bandwidth between devices of one host or of one TPU slice, each way, of one device. 0: they share memory."""
    rates: Rates | None
    cuda: CudaChip | None = None
    topologies: tuple[str, ...] = ()
    """Topologies of TPUs by their compiler's names, smallest first."""
    host_link_bytes_per_s: float = 0.0
    """Bandwidth between hosts, each way, of one device; 0: that between devices, as in a TPU slice."""

    @property
    def limit_bytes(self) -> int:
        """Memory limit of one device that the runtime would report."""
        return int(self.memory_bytes * self.runtime_share)


def _nvidia(
    name: str, title: str, memory_bytes: int, nvlink_gbps: int, nic_gbps: int, rates: Rates, chip: CudaChip
) -> Device:
    """Return a GPU in an HGX host. nvlink_gbps: of NVLink, each way; nic_gbps: of its own network adapter."""
    within, between = nvlink_gbps * 1e9, nic_gbps * 1e9
    return Device(
        name, title, "gpu", memory_bytes, GPU_SHARE, 8, within, rates, cuda=chip, host_link_bytes_per_s=between
    )


def _tpu(
    name: str,
    title: str,
    memory_gib: float,
    most: int,
    tflops: float,
    gbps: int,
    ici_gbps: int,
    topologies: str,
    eight_bits: Literal["int8", "fp8"] = "int8",
) -> Device:
    """Return a TPU. ici_gbps: of all links of a chip, both ways. eight_bits: the dtype with twice the bfloat16 rate; the
    other one is upcast."""
    # Six passes of bfloat16 make a float32 matmul (jax.lax.Precision.HIGHEST).
    flops, source = tflops * 1e12, f"published spec: docs.cloud.google.com/tpu/docs/{topologies.partition(':')[0]}"
    int8_ops, fp8_flops = (2 * flops, flops) if eight_bits == "int8" else (flops, 2 * flops)
    rates = Rates(gbps * 1e9, flops, flops / 6, int8_ops, fp8_flops, source)
    memory_bytes, names = int(memory_gib * _GIB), tuple(topologies.split())
    return Device(name, title, "tpu", memory_bytes, 1.0, most, ici_gbps / 2 * 1e9, rates, topologies=names)


_HOPPER = CudaChip((9, 0), 132, 128, 1.98, 50 << 20, 233472, 232448)
# Memory of GPUs: OpenXLA's reference target configs. Memory of TPUs: the available HBM that their compiler reports.
_TABLE = (
    _nvidia(
        "a100",
        "NVIDIA A100 SXM 80 GB",
        85100068864,
        300,
        25,
        Rates(2.039e12, 312e12, 19.5e12, 624e12, 312e12, "published spec: NVIDIA A100 data sheet"),
        CudaChip((8, 0), 108, 64, 1.41, 40 << 20, 167936, 166912),
    ),
    _nvidia(
        "h100",
        "NVIDIA H100 SXM 80 GB",
        84942979072,
        450,
        50,
        Rates(3.35e12, 989e12, 67e12, 1979e12, 1979e12, "published spec: NVIDIA H100 data sheet"),
        _HOPPER,
    ),
    _nvidia(
        "h200",
        "NVIDIA H200 SXM 141 GB",
        151397597184,
        450,
        50,
        Rates(4.8e12, 989e12, 67e12, 1979e12, 1979e12, "published spec: NVIDIA H200 data sheet"),
        _HOPPER,
    ),
    _nvidia(
        "b200",
        "NVIDIA B200 180 GB",
        191514411008,
        900,
        50,
        Rates(
            8.0e12, 2250e12, 80e12, 4500e12, 4500e12, "published spec: NVIDIA Blackwell architecture brief, HGX B200"
        ),
        CudaChip((10, 0), 148, 128, 1.965, 132644864, 233472, 232448),
    ),
    # Cards on PCIe: the bandwidth between devices is that of the slot. Float32 is accumulated at full precision.
    _nvidia(
        "t4",
        "NVIDIA T4 16 GB",
        15843721216,
        16,
        6,
        Rates(
            320e9, 65e12, 8.1e12, 130e12, 65e12, "published spec: NVIDIA T4 data sheet, float16 in place of bfloat16"
        ),
        CudaChip((7, 5), 40, 64, 1.59, 4 << 20, 65536, 65536, 1024),
    ),
    _nvidia(
        "l40s",
        "NVIDIA L40S 48 GB",
        47697362944,
        32,
        12,
        Rates(864e9, 362e12, 91.6e12, 733e12, 733e12, "published spec: NVIDIA L40S data sheet"),
        CudaChip((8, 9), 142, 128, 2.52, 96 << 20, 102400, 101376, 1536),
    ),
    _nvidia(
        "rtx4090",
        "NVIDIA GeForce RTX 4090 24 GB",
        25386352640,
        32,
        3,
        Rates(1008e9, 165.2e12, 82.6e12, 660.6e12, 330.3e12, "published spec: NVIDIA Ada architecture white paper"),
        CudaChip((8, 9), 128, 128, 2.52, 72 << 20, 102400, 101376, 1536),
    ),
    _nvidia(
        "rtx5090",
        "NVIDIA GeForce RTX 5090 32 GB",
        33670758400,
        64,
        3,
        Rates(
            1792e9, 209.5e12, 104.8e12, 838e12, 419e12, "published spec: NVIDIA RTX Blackwell architecture white paper"
        ),
        CudaChip((12, 0), 170, 128, 2.407, 96 << 20, 102400, 101376, 1536),
    ),
    _tpu("v5e", "Cloud TPU v5e", 15.75, 8, 197, 819, 400, "v5e:2x2 v5e:2x4 v5e:4x4 v5e:4x8 v5e:8x8"),
    _tpu("v5p", "Cloud TPU v5p", 95.73, 4, 459, 2765, 1200, "v5p:2x2x1 v5p:2x2x2 v5p:2x2x4 v5p:2x4x4 v5p:4x4x4"),
    _tpu("v6e", "Cloud TPU v6e", 31.24, 8, 918, 1640, 896, "v6e:2x2 v6e:2x4 v6e:4x4 v6e:4x8 v6e:8x8"),
    # A chip is two devices with half of its memory and rates each; it multiplies fp8, not int8.
    _tpu(
        "v7x",
        "Cloud TPU7x (half a chip)",
        94.74,
        8,
        1153.5,
        3690,
        1200,
        "tpu7x:2x2x1 tpu7x:2x2x2 tpu7x:2x2x4 tpu7x:2x4x4",
        "fp8",
    ),
)
ACCELERATORS: Mapping[str, Device] = MappingProxyType({device.name: device for device in _TABLE})
NAMES = ("cpu", *ACCELERATORS)


def find_device(name: str, memory_bytes: int | None = None) -> Device:
    """Return a device of the table, or this machine's CPU with its free memory; `memory_bytes` replaces its limit."""
    device = ACCELERATORS.get(name) or Device(
        "cpu", f"this machine's CPU, {num_cores()} cores", "cpu", available_bytes(), 1.0, 1, 0.0, None
    )
    return device if memory_bytes is None else replace(device, memory_bytes=memory_bytes, runtime_share=1.0)


def measure_cpu_rates() -> Rates:
    """Measure this CPU, as rates of a part of a shared machine are not published: the best runs of a second.

    Measured are bytes per second of a matrix-vector matmul and operations per second of a square matmul, in float32.
    Other dtypes get the same rate: CPUs compute activations in float32, and the gain of int8 kernels depends on
    instructions that numpy does not use.
    """
    matrix, vector = np.ones(_VECTOR_SHAPE, np.float32), np.ones(_VECTOR_SHAPE[1], np.float32)
    bytes_per_s = matrix.nbytes / _best_seconds(lambda: matrix @ vector)
    square = np.ones((_SQUARE, _SQUARE), np.float32)
    flops = 2 * _SQUARE**3 / _best_seconds(lambda: square @ square)
    return Rates.alike(bytes_per_s, flops, "measured on this machine now, by numpy")


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + _SECONDS_EACH
    while (started := time.perf_counter()) < end:
        run()
        best = min(best, time.perf_counter() - started)
    return best
