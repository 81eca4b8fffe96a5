"""Kernels for x86-64 and ARM64 CPUs in C++, called through XLA's FFI. Optional: without them the same ops run on XLA alone.

    build        compiles them, into this package: `python -m jaxserve_kernels.native.build`
    processors   whom a library is for: this host, or a generation of processors
    library      finds the best that was built, and registers it with JAX
    memory       zeroed arrays whose memory comes later
    reports      tokens of a loop, read while it goes on

They exist for what XLA:CPU does far below the machine's bound: matmuls with few rows, and attention over
pages. Floating-point sums have one order whatever else is in the batch.
"""

from jaxserve_kernels.native.library import has, has_amx, library_file, register
from jaxserve_kernels.native.memory import MemoryProvider, untouched_zeros
from jaxserve_kernels.native.reports import Reports, report

__all__ = ["MemoryProvider", "Reports", "has", "has_amx", "library_file", "register", "report", "untouched_zeros"]
