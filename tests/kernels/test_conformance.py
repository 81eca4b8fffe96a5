"""Every implementation of paged attention against the dense answer, case by case."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention import decode_attention, gpu, mixed_attention, ragged_layout
from jaxserve_kernels.paged_attention.cases import (
    CASES,
    LAYER,
    TOLERANCES,
    Case,
    Operands,
    expected,
    long_row,
    operands,
)

from tests.kernels.gpu_interpreter import gpu_interpreter

CASES_BY_SPEED = pytest.mark.parametrize(
    "case",
    [case if case.kv_dtype == "int8" else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=str,
)


def _check(case: Case, given: Operands, out: jax.Array) -> None:
    found = np.asarray(out, np.float64)
    assert np.isfinite(found).all()
    wanted = expected(case, given)
    np.testing.assert_allclose(found[: len(wanted)], wanted, atol=TOLERANCES[case.dtype], rtol=0)


def _run(case: Case, given: Operands, decode: Callable[..., jax.Array], mixed: Callable[..., jax.Array]) -> jax.Array:
    options = {"scoring": case.scoring, "sinks": None if given.sinks is None else jnp.asarray(given.sinks)}
    pool = map(jnp.asarray, (given.q, given.k_pages, given.v_pages, np.int32(LAYER), given.tables, given.lengths))
    if case.is_decode:
        return decode(*pool, **options)
    starts, num_decode = jnp.asarray(given.query_starts), jnp.int32(case.num_decode_rows)
    return mixed(*pool, (starts, num_decode, given.q.shape[0]), **options)


@CASES_BY_SPEED
def test_the_reference_equals_dense_softmax(case: Case) -> None:
    given = operands(case)

    def mixed(*arguments: jax.Array, **options: object) -> jax.Array:
        *pool, (starts, num_decode, num_tokens) = arguments
        return mixed_attention(*pool, ragged_layout(starts, num_decode, num_tokens=num_tokens), **options)

    _check(case, given, _run(case, given, decode_attention, mixed))


@CASES_BY_SPEED
def test_the_kernels_for_hopper_equal_dense_softmax_without_a_race(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _check(case, operands(case), _by_kernels(case, operands(case), monkeypatch))


@pytest.mark.slow
def test_a_row_of_131072_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = long_row(1, 131072)
    _check(case, given, _by_kernels(case, given, monkeypatch))


@pytest.mark.slow
def test_the_window_of_a_row_of_131072_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its last pages are of numbers: what is ahead of the window is the null page's, which nobody may read."""
    case = Case((1, 1), (128, 3), sliding_window=50)
    given = operands(case)
    ahead = 131072 - 128
    tables = np.pad(given.tables, ((0, 0), (ahead // case.page_size, 0)))
    tables[1, : given.tables.shape[1]] = given.tables[1]
    far = given._replace(tables=tables, lengths=given.lengths + np.array([ahead, 0], np.int32))
    _check(case, given, _by_kernels(case, far, monkeypatch))


def _by_kernels(case: Case, given: Operands, monkeypatch: pytest.MonkeyPatch) -> jax.Array:
    """Interpreted; no thread races."""
    pool_shape, dtype = given.k_pages.shape, given.q.dtype
    with gpu_interpreter() as has_raced:
        assert gpu.unsupported(case.num_heads, pool_shape, dtype, given.k_pages.dtype) is None
        from jaxserve_kernels.paged_attention import tuning
        from jaxserve_kernels.paged_attention.gpu import attention

        known = tuning.load(attention._DEVICE)
        few = {name: sizes | {"programs": 2} for name, sizes in known.items()}  # each does several units
        few["decode"] |= {"min_split": 64, "splits": 16}
        monkeypatch.setattr(tuning, "load", lambda device: few)

        def mixed(*arguments: jax.Array, **options: object) -> jax.Array:
            *pool, (starts, num_decode, num_tokens) = arguments
            ragged = ragged_layout(starts, num_decode, num_tokens=num_tokens, backend="mosaic_gpu")
            return attention.mixed_attention(*pool, ragged, is_emulated=True, **options)

        def decode(*arguments: jax.Array, **options: object) -> jax.Array:
            return attention.decode_attention(*arguments, is_emulated=True, **options)

        out = jax.block_until_ready(_run(case, given, decode, mixed))
        assert not has_raced()
    return out
