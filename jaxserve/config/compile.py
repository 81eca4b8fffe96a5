"""Settings of kernels, of compiled programs and of their cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.config.option import option
from jaxserve.errors import ConfigError

CpuKernels = Literal["auto", "native", "matrix", "vector", "xla"]
Warmup = Literal["auto", "all"]
AttentionBackend = Literal["auto", "reference", "pallas"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Programs, kernels and the compile cache."""

    attention_backend: AttentionBackend = option(
        "auto",
        help="paged-attention kernel; auto: pallas on TPUs and on GPUs from Ampere on, native kernels on CPUs if they are built, "
        "else reference (XLA)",
    )
    cpu_kernels: CpuKernels = option(
        "auto",
        help="native: C++ kernels built by `python -m jaxserve_kernels.native.build`, with AMX if the processor has it and "
        "--max-num-seqs is over 4; matrix: with AMX; vector: without; xla: no native kernels; auto: native on CPUs if "
        "they are built",
    )
    try_kernels: bool = option(
        True,
        help="compare the Pallas kernels with XLA, in a separate process, before their first use; if they fail, XLA "
        "computes attention",
    )
    deterministic: bool = option(
        False,
        help="serve only if the same request gets the same bits whatever else runs: on one CPU device with native kernels, "
        "--quantization none, int8, mxfp4-weight-only or nvfp4-weight-only",
    )
    warmup: Warmup = option(
        "auto",
        help="programs that the server loads or compiles before it is ready; all: every one; auto: all, but with native CPU kernels "
        "and one host only the largest of each kind, which serve any step, while the smaller ones follow beside requests",
    )
    compile_cache: str | None = option(
        None,
        unit="path",
        help="directory of compiled programs, at most 2GiB (default: jaxserve/programs in $XDG_CACHE_HOME or ~/.cache; "
        "`off`: none)",
    )

    def __post_init__(self) -> None:
        if self.needs_cpu_kernels and self.attention_backend != "auto":
            raise ConfigError(
                f"--cpu-kernels {self.cpu_kernels} and --attention-backend {self.attention_backend} exclude each other"
            )

    @property
    def needs_cpu_kernels(self) -> bool:
        """True if an engine without native kernels does not start."""
        return self.cpu_kernels not in ("auto", "xla")
