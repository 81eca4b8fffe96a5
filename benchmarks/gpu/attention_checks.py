"""Attention on the device, through the public functions: the cases that every implementation must pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention import (
    Paging,
    Ragged,
    ragged_layout,
    write_and_attend,
)
from jaxserve_kernels.paged_attention.cases import LAYER, Case, Operands, error, operands

from benchmarks.gpu.crew import Bench


def check_write_and_attend(case: Case, backend: Backend, bench: Bench) -> None:
    """The step's own keys and values are not in their pages before the step, and are exactly there after it."""
    given = operands(case, bench.seed)
    pages, slots = _places(case, given)
    scales = _scales(case, bench.random)
    keys, values = (_stored(pool, pages, slots, scale) for pool, scale in zip(given[1:3], scales, strict=True))
    before = [pool.copy() for pool in given[1:3]]
    for pool in before:
        pool[LAYER, pages, :, slots] = pool[LAYER, 0, :, 0]  # as huge as the null page
    has_scales = case.kv_dtype is not None

    def attend(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, k_pages, v_pages, tables, lengths, pages, slots = arrays
        ragged = None if case.is_decode else _ragged(case, given, backend)
        paging = Paging(tables, lengths, jnp.asarray(given.query_starts), pages, slots, ragged)
        return write_and_attend(
            q,
            k,
            v,
            k_pages,
            v_pages,
            jnp.int32(LAYER),
            paging,
            scoring=case.scoring,
            scales=KVScales(*map(jnp.asarray, scales)) if has_scales else None,
            backend=backend,
        )

    arrays = (given.q, keys, values, *before, given.tables, given.lengths, pages, slots)
    arguments = tuple(map(jnp.array, arrays))  # copies: the pools are donated
    found, *pools = map(np.asarray, bench.compile(attend, *arguments, donate=(3, 4))(*arguments))
    group = case.num_heads // case.num_kv_heads
    of_keys, of_values = (np.repeat(scale, group)[:, None] for scale in scales)
    scaled = given._replace(q=(given.q * of_keys).astype(given.q.dtype))
    name = f"{backend}: write and attend, {case}"
    worst = error(case, scaled, found / of_values)
    bench.recorder.check(name, passed=worst <= 1, error=worst, tolerance=1.0)
    same = (np.array_equal(_bits(a), _bits(b)) for a, b in zip(pools, given[1:3], strict=True))
    bench.recorder.check(f"{name}: pages", passed=all(same))


def _ragged(case: Case, given: Operands, backend: Backend) -> Ragged:
    starts, num_decode_rows = jnp.asarray(given.query_starts), jnp.int32(case.num_decode_rows)
    return ragged_layout(starts, num_decode_rows, num_tokens=len(given.q), backend=backend)


def _places(case: Case, given: Operands) -> tuple[np.ndarray, np.ndarray]:
    """Page and slot of every token of the step; the null page's first slot for padding."""
    pages, slots = np.zeros((2, len(given.q)), np.int32)
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        if length:
            positions = np.arange(length - count, length)
            tokens = slice(given.query_starts[row], given.query_starts[row + 1])
            pages[tokens], slots[tokens] = given.tables[row, positions // case.page_size], positions % case.page_size
    return pages, slots


def _scales(case: Case, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Powers of two, so that nothing is rounded that the answer does not round; ones for a pool without scales."""
    if case.kv_dtype is None:
        return (np.ones(case.num_kv_heads, np.float32),) * 2
    keys, values = (2.0 ** random.integers(-2, 2, case.num_kv_heads) for _ in range(2))
    return keys.astype(np.float32), values.astype(np.float32)


def _stored(pool: np.ndarray, pages: np.ndarray, slots: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values at these places, multiplied by their scales: (T, K, H)."""
    numbers: np.ndarray = pool[LAYER, pages, :, slots].astype(np.float32) * scales[:, None]
    return numbers


def _bits(pool: np.ndarray) -> np.ndarray:
    """Compare all pages but the null page; NaN equals itself."""
    return np.ascontiguousarray(pool[:, 1:]).view(np.uint8)
