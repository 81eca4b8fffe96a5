"""Processors that a library is compiled for: this very one, or every one that has certain features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final


@dataclass(frozen=True, slots=True)
class Generation:
    """Processors that one library runs on."""

    name: str
    machine: str
    """Its architecture, as `uname -m` calls it."""
    compiler_flags: tuple[str, ...]
    features: frozenset[str]
    """All that the compiler may make use of, as /proc/cpuinfo calls it."""

    @property
    def is_here(self) -> bool:
        """Return True if this processor is one of them, and the system lets us use all of it."""
        return self.features <= frozenset(processor_flags().split())


_X86: Final = "x86_64"
_AVX2: Final = frozenset(
    "abm avx avx2 bmi1 bmi2 cx16 f16c fma lahf_lm movbe pni popcnt sse4_1 sse4_2 ssse3 xsave".split()
)
_AVX512: Final = _AVX2 | frozenset("avx512bw avx512cd avx512dq avx512f avx512vl".split())
_NEON: Final = frozenset("asimd asimddp asimdrdm atomics crc32 fp".split())

_VNNI: Final = ("-march=x86-64-v4", "-mavx512vnni")
_AMX: Final = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")

GENERATIONS: Final = (
    Generation("amx", _X86, _VNNI + _AMX, _AVX512 | {"avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}),
    Generation("avx512-vnni", _X86, _VNNI, _AVX512 | {"avx512_vnni"}),
    Generation("avx512", _X86, ("-march=x86-64-v4",), _AVX512),
    Generation("avx2", _X86, ("-march=x86-64-v3",), _AVX2),
    Generation("neon", "aarch64", ("-march=armv8.2-a+dotprod",), _NEON),
)
"""The best of a machine first."""


CPU_FILE: Final = "/proc/cpuinfo"


@cache
def processor_flags() -> str:
    """Return the features of this processor, as /proc/cpuinfo lists them; empty without that file."""
    try:
        with open(CPU_FILE, encoding="ascii", errors="replace") as file:
            return next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ""
