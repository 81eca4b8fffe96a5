"""Decode attention in buckets of context, by XLA: against dense softmax, in every bucket and over several blocks."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.ops import as_arrays
from jaxserve_kernels.paged_attention import Scoring, bucketed, decode_attention, reference
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, Case, Operands, error, long_row, operands

pytestmark = pytest.mark.slow

_decode = jax.jit(decode_attention, static_argnames=("scoring", "backend"))
"""One program: one for each operation takes three times as long to compile."""

DECODE = [CASES[i] for i in (0, 4, 5, 6, 10)]
"""Ragged and empty rows, sinks, a softcap, a window, a narrow pool; head dimensions that no matmul is needed for."""


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 2, 4, ... pages of 16 tokens, in blocks of a few."""
    monkeypatch.setattr(bucketed, "_SHORTEST", 32)
    monkeypatch.setattr(bucketed, "_BLOCK_BYTES", 3 * 4 * 4 * 4 * 64)


def run(case: Case, given: Operands) -> jax.Array:
    q, k_pages, v_pages, tables, lengths, _, sinks = as_arrays(given)
    pool = (q, k_pages, v_pages, jnp.int32(LAYER), tables, lengths)
    return _decode(*pool, scoring=case.scoring, sinks=sinks, backend="bucketed")


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_buckets_equal_dense_softmax(case: Case) -> None:
    given = operands(case)
    assert error(case, given, run(case, given)) <= 1


@pytest.mark.parametrize("length", [1, 32, 33, 64, 65, 128, 129])
def test_each_bucket_holds_its_longest_row(length: int) -> None:
    case = Case((1, 1, 1, 1), (length, 1, 0, 7), dim=16, num_pages=30)
    given = operands(case)
    tables = np.zeros((4, 12), np.int32)  # one program for all lengths
    tables[:, : given.tables.shape[1]] = given.tables[:, :12]
    assert error(case, given, run(case, given._replace(tables=tables))) <= 1


def test_no_page_of_a_long_row_is_missed() -> None:
    case, given = long_row(1, 1024)
    assert error(case, given, run(case, given)) <= 1


def test_buckets_are_no_loop_and_longer_contexts_are() -> None:
    given = operands(CASES[0])
    q, k, v, lengths = (jnp.asarray(each) for each in (given.q, given.k_pages, given.v_pages, given.lengths))

    def text(pages: int) -> str:
        tables = jnp.zeros((4, pages), jnp.int32)
        program = jax.jit(lambda *given: bucketed.decode_attention(*given, scoring=CASES[0].scoring))
        return program.lower(q, k, v, jnp.int32(LAYER), tables, lengths).as_text()

    most = 8 * 3
    assert "stablehlo.case" in text(most)
    assert "stablehlo.while" not in text(most)
    assert "stablehlo.while" in text(most + 1)


@pytest.mark.parametrize("chunk", [16, 40])
def test_chunks_of_keys_are_those_of_the_reference(chunk: int) -> None:
    case = Case((1, 1, 1, 1), (chunk, chunk + 1, 0, 3 * chunk - 1), dim=16)
    given = operands(case)
    pool = (given.q, given.k_pages, given.v_pages, np.int32(LAYER), given.tables, given.lengths)
    scoring = Scoring(0.25, sliding_window=chunk, is_chunked=True)
    found, wanted = (
        jax.jit(partial(attention.decode_attention, scoring=scoring))(*map(jnp.asarray, pool))
        for attention in (bucketed, reference)
    )
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), atol=2e-2)
