"""Kernels for x86-64 CPUs in C++, called through XLA's FFI. Optional: without them the same ops run on XLA alone.

    build     compiles them for this host, into this package: `python -m jaxserve_kernels.native.build`
    library   finds what was built, and registers it with JAX

They exist for what XLA:CPU does far below the machine's bound: products with few rows, and attention over
pages. Floating-point sums have one order whatever else is in the batch.
"""

from jaxserve_kernels.native.library import has, library_file, register

__all__ = ["has", "library_file", "register"]
