"""Paged attention by the kernels for Hopper, interpreted with the race detector on.

The other half of the cases is computed by the kernels' PTX, with other detectors of races: tests/ptx/test_attention_ptx.py.
Of the slow cases CI has every second one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention import gpu, ragged_layout
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, SLOW, Case, Operands, error, long_row, operands

from tests.kernels.gpu_interpreter import gpu_interpreter
from tests.ptx.test_attention_ptx import DECODE, PREFILL


def _run(case: Case, given: Operands, decode: Callable[..., jax.Array], mixed: Callable[..., jax.Array]) -> jax.Array:
    options = {"scoring": case.scoring, "sinks": None if given.sinks is None else jnp.asarray(given.sinks)}
    pool = map(jnp.asarray, (given.q, given.k_pages, given.v_pages, np.int32(LAYER), given.tables, given.lengths))
    if case.is_decode:
        return decode(*pool, **options)
    starts, num_decode = jnp.asarray(given.query_starts), jnp.int32(case.num_decode_rows)
    return mixed(*pool, (starts, num_decode, given.q.shape[0]), **options)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow, pytest.mark.exhaustive][: 1 + i % 2] if case in SLOW else [])
        for i, case in enumerate(case for case in CASES if case not in (*DECODE, *PREFILL))
    ],
    ids=str,
)
def test_the_kernels_for_hopper_equal_dense_softmax_without_a_race(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(case)
    assert error(case, given, _by_kernels(case, given, monkeypatch)) <= 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of tiles for each of several splits; the test of the window below has the places of 131,072 tokens."""
    case, given = long_row(1, 32768)
    assert error(case, given, _by_kernels(case, given, monkeypatch)) <= 1


@pytest.mark.slow
def test_the_window_of_a_row_of_131072_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its last pages hold numbers: ahead of the window is the null page, which must not be read."""
    case = Case((1, 1), (128, 3), sliding_window=50)
    given = operands(case)
    ahead = 131072 - 128
    tables = np.pad(given.tables, ((0, 0), (ahead // case.page_size, 0)))
    tables[1, : given.tables.shape[1]] = given.tables[1]
    far = given._replace(tables=tables, lengths=given.lengths + np.array([ahead, 0], np.int32))
    assert error(case, given, _by_kernels(case, far, monkeypatch)) <= 1


def _by_kernels(case: Case, given: Operands, monkeypatch: pytest.MonkeyPatch) -> jax.Array:
    """Return the interpreted kernel's result; fails if threads race."""
    pool_shape, dtype = given.k_pages.shape, given.q.dtype
    with gpu_interpreter() as has_raced:
        assert gpu.unsupported(case.num_heads, pool_shape, dtype, given.k_pages.dtype) is None
        from jaxserve_kernels.paged_attention import tuning
        from jaxserve_kernels.paged_attention.gpu import attention

        known = tuning.load(attention._DEVICE)
        few = {name: sizes | {"programs": 2} for name, sizes in known.items()}  # each does several units
        few["decode"] |= {"min_split": 64, "long_split": 128, "waves": 8}
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
