"""Conformance cases of KV writes: the named slots change, exactly, and no other byte does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Num

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write.api import kv_write
from jaxserve_kernels.kv_write.scales import KVScales
from jaxserve_kernels.ops import as_arrays

LAYER, NUM_LAYERS, NUM_PAGES, NUM_HEADS, PAGE_SIZE, DIM = 1, 2, 9, 2, 16, 8


@dataclass(frozen=True, slots=True)
class Case:
    """New keys and values of `num_tokens` tokens. A pool of another type has scales."""

    num_tokens: int
    dtype: str = "float32"
    pool_dtype: str = "float32"
    has_scale_for_each_number: bool = False
    """False: one for each head."""

    def __str__(self) -> str:
        each = "-scale-for-each-number" if self.has_scale_for_each_number else ""
        return f"{self.num_tokens}-{self.dtype}-into-{self.pool_dtype}{each}"


class Operands(NamedTuple):
    """Arrays of one call; see `api`."""

    k_pages: np.ndarray  # (L, P, K, S, H)
    v_pages: np.ndarray
    k: np.ndarray  # (T, K, H)
    v: np.ndarray
    pages: np.ndarray  # (T,)
    slots: np.ndarray  # (T,)
    scales: KVScales | None  # (K,) each, or (K, H)


def operands(case: Case, seed: int = 0) -> Operands:
    """Return random operands. Scales are powers of two, so that dividing by them rounds nothing. See `ops.OpCases`."""
    random = np.random.default_rng(seed)
    shape = (NUM_LAYERS, NUM_PAGES, NUM_HEADS, PAGE_SIZE, DIM)
    k_pages, v_pages = (random.standard_normal(shape).astype(_dtype(case.pool_dtype)) for _ in range(2))
    new = random.standard_normal((2, case.num_tokens, NUM_HEADS, DIM))
    new[..., 3], new[..., 0, 5] = 5e3, np.nan  # beyond the range of 8-bit types, and no number
    places = random.permutation(np.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE))[: case.num_tokens]  # none on the null page
    of_head = (DIM,) if case.has_scale_for_each_number else ()
    scales = 2.0 ** random.integers(-3, 3, (2, NUM_HEADS, *of_head)).astype(np.float32)
    k, v = new.astype(_dtype(case.dtype))
    pages, slots = (each.astype(np.int32) for each in np.divmod(places, PAGE_SIZE))
    has_scales = case.dtype != case.pool_dtype
    return Operands(k_pages, v_pages, k, v, pages, slots, KVScales(*map(jnp.asarray, scales)) if has_scales else None)


def run(
    case: Case, given: Operands, backend: Backend, *, is_emulated: bool = False
) -> tuple[Num[Array, "L P K S H"], Num[Array, "L P K S H"]]:
    """Write the tokens of a case. See `ops.OpCases`."""
    k_pages, v_pages, k, v, pages, slots, scales = as_arrays(given)
    return kv_write(k_pages, v_pages, jnp.int32(LAYER), k, v, pages, slots, scales=scales)


def error(case: Case, given: Operands, out: Any) -> float:
    """Return 0 if the pools hold exactly what they should, else infinity. See `ops.OpCases`."""
    scales = map(np.asarray, given.scales.by_number if given.scales else np.ones((2, NUM_HEADS, 1), np.float32))
    is_equal = True
    for before, new, scale, found in zip(given[:2], given[2:4], scales, out, strict=True):
        wanted = before.copy()
        wanted[LAYER, given.pages, :, given.slots] = _stored(new.astype(np.float32) / scale, wanted.dtype)
        is_equal &= np.array_equal(np.asarray(found).view(np.uint8), wanted.view(np.uint8))
    return 0.0 if is_equal else np.inf


def _stored(new: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return float32 numbers in the pool's type: NaN as 0, numbers beyond its range at its ends."""
    is_integer = np.issubdtype(dtype, np.integer)
    info: Any = np.iinfo(dtype) if is_integer else ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    limited: np.ndarray = np.clip(np.nan_to_num(new), float(info.min), float(info.max))
    return (np.round(limited) if is_integer else limited).astype(dtype)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


CASES = (
    Case(1),
    Case(100, "bfloat16", "bfloat16"),
    Case(7, "float16", "int8"),
    Case(7, "float32", "int8", has_scale_for_each_number=True),
    Case(100, "bfloat16", "float8_e4m3fn"),
)
SLOW: tuple[Case, ...] = ()
BACKENDS: tuple[Backend, ...] = ()
