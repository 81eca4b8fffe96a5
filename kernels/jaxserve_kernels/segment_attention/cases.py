"""Conformance cases of segment attention, against float64. Padding holds NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.segment_attention.api import attend_segments

_TOLERANCE = 5e-6
"""Largest error of a result; values are a few units large."""


@dataclass(frozen=True, slots=True)
class Case:
    """Segments of these lengths."""

    lengths: tuple[int, ...]
    padding: int = 3
    num_heads: int = 2
    head_dim: int = 32
    scale: float = 0.3
    queries: tuple[int, int] | None = None
    """The first token that attends, and the number of those that do; None: all."""
    window: int | None = None
    """Tokens on each side of one, itself included, that it attends to; None: all."""
    has_bias: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def attending(self) -> slice:
        """The tokens that attend."""
        first, count = self.queries or (0, self.num_tokens + self.padding)
        return slice(first, first + count)

    def __str__(self) -> str:
        name = f"{'.'.join(map(str, self.lengths))}+{self.padding}-{self.num_heads}x{self.head_dim}-{self.scale}"
        name = name if self.window is None else f"{name}-window{self.window}"
        name = f"{name}-bias" if self.has_bias else name
        return name if self.queries is None else f"{name}-{self.attending.start}to{self.attending.stop}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    numbers: np.ndarray
    bias: np.ndarray
    """Numbers of each head and distance; without any distance if there are none."""


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    count = sum(case.lengths)
    arrays = random.standard_normal((3, count + case.padding, case.num_heads, case.head_dim)).astype(np.float32)
    arrays[:, count:] = np.nan
    query, key, value = arrays
    numbers = np.repeat([*range(len(case.lengths)), len(query)], [*case.lengths, case.padding])
    bias = random.standard_normal((case.num_heads, 2 * max(case.lengths) - 1 if case.has_bias else 0))
    return Operands(query, key, value, numbers.astype(np.int32), bias.astype(np.float32))


def run(case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False) -> Float[Array, "Q N H"]:
    """Attend within the segments of a case. See `ops.OpCases`."""
    count, longest = jnp.int32(sum(case.lengths)), max(case.lengths)
    query, key, value, numbers, bias = as_arrays(given)
    first = None if case.queries is None else jnp.int32(case.attending.start)
    own = query[case.attending]
    options: dict[str, Any] = {"scale": case.scale, "longest": longest, "window": case.window}
    options["bias"] = bias if case.has_bias else None
    return attend_segments(own, key, value, numbers, count, first, **options, backend=backend)


def error(case: Case, given: Operands, out: Any) -> float:
    """Return the largest error relative to the tolerance. See `ops.OpCases`."""
    exact, begin = np.empty_like(given.query, np.float64), 0
    for length in case.lengths:
        own = slice(begin, begin + length)
        query, key, value = (array[own].astype(np.float64) for array in given[:3])
        scores = np.einsum("qnh,knh->nqk", query, key) * case.scale
        distances = np.subtract.outer(np.arange(length), np.arange(length)).T  # of keys after their queries
        if case.has_bias:
            scores += given.bias[:, distances + max(case.lengths) - 1]
        scores = np.where(np.abs(distances) < (case.window or length), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        exact[own] = np.einsum("nqk,knh->qnh", shares / shares.sum(-1, keepdims=True), value)
        begin += length
    found, exact = np.asarray(out, np.float64), exact[: case.num_tokens][case.attending]
    difference = np.abs(found[: len(exact)] - exact)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0)) / _TOLERANCE


CASES = (
    Case((1,), padding=0),
    Case((64, 1, 130, 7), num_heads=3),
    Case((100, 3), head_dim=72, scale=72**-0.5),
    Case((300,), num_heads=1, head_dim=20, scale=2.0),
    Case((17, 65), padding=140, head_dim=80),
    Case((64, 1, 130, 7), queries=(60, 100)),
    Case((300,), queries=(128, 128), head_dim=72),
    Case((100, 60), padding=96, queries=(128, 128)),
    Case((300, 9, 140), window=17),
    Case((70, 30), window=40, queries=(20, 60)),
    Case((5, 3), window=1),
    Case((300, 9, 140), has_bias=True),
    Case((70, 230), window=90, queries=(90, 200), has_bias=True),
)
"""One token, blocks of keys that are full or not, groups of queries that are full or not, head dims that fill no vector, and some
of the queries: across segments, in the middle of one, and with padding; windows that are shorter than some segments or than all; a bias."""
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ("native",)
