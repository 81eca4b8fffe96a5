"""Finds the ops of this package: every folder with a `cases.py`.

Conformance tests and the GPU benchmark run what they find here, so a new folder needs no entry anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast, runtime_checkable

import jax

from jaxserve_kernels.backend import Backend


@runtime_checkable
class OpCases(Protocol):
    """The module `cases` of an op. `str(case)` is a case's name, unique in its op."""

    @property
    def CASES(self) -> Sequence[Any]: ...

    @property
    def SLOW(self) -> Sequence[Any]:
        """Cases that `make check` and quick benchmarks leave out."""
        ...

    @property
    def BACKENDS(self) -> tuple[Backend, ...]:
        """Backends, beside the reference, whose kernels the conformance test runs: native ones, and Pallas kernels under
        their interpreters."""
        ...

    def operands(self, case: Any, seed: int = 0) -> tuple[Any, ...]:
        """Return random operands of a case: a tuple of numpy arrays and None."""
        ...

    def run(self, case: Any, given: Any, backend: Backend, *, is_emulated: bool = False) -> Any:
        """Call the op with these operands, numpy or JAX arrays. is_emulated: by an interpreter, with few small blocks."""
        ...

    def error(self, case: Any, given: Any, out: Any) -> float:
        """Return the largest error of a result, 1 being the largest allowed; infinite for numbers that are not finite."""
        ...


@cache
def ops() -> Mapping[str, OpCases]:
    """Return every op's cases, by the name of its folder."""
    names = sorted(file.parent.name for file in Path(__file__).parent.glob("*/cases.py"))
    found = {name: cast(OpCases, import_module(f"jaxserve_kernels.{name}.cases")) for name in names}
    return MappingProxyType(found)


def as_arrays(given: Any) -> Any:
    """Return operands as JAX arrays. Numbers of 4 bits become bytes on CPUs, which have no layout for them."""

    def place(array: Any) -> jax.Array:
        is_narrow = str(array.dtype) == "int4" and jax.default_backend() == "cpu"
        return jax.numpy.asarray(array.astype("int8") if is_narrow else array)

    return jax.tree.map(place, given)
