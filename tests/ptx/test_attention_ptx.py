"""Attention by the PTX that the compiler makes of its kernels: against dense softmax, in several orders of events."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention import layout
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, TOLERANCES, Case, expected, operands
from jaxserve_kernels.paged_attention.tuning import decode_tuning, prefill_tuning

from tests.ptx.launch import emulated

pytestmark = [pytest.mark.aot, pytest.mark.slow]

NUM_PROGRAMS = 3
"""Few, so that each does several units."""
_DEVICE = "h200"
_LEAST_SPLIT, _LONG_SPLIT, _WAVES = 64, 128, 6
DECODE = [CASES[i] for i in (1, 3, 5, 6, 8, 9)]
"""Both types, both narrow pools, a window, a softcap, sinks; head dimensions from 64 to 256, pages of 16 to 128 tokens."""
PREFILL = [CASES[i] for i in (13, 15, 17, 18, 19)]
"""Cases of prefill with the variety of DECODE."""


@pytest.mark.parametrize(
    "case", [*DECODE[::2], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in DECODE[1::2])], ids=str
)
def test_decode_equals_dense_softmax_in_any_order(case: Case) -> None:
    given = operands(case)
    q, k, v, tables, lengths, _ = (jnp.asarray(each) for each in given[:6])
    sizes = decode_tuning(_DEVICE, case.dim, k.dtype.itemsize)
    sizes = replace(sizes, programs=NUM_PROGRAMS, min_split=_LEAST_SPLIT, long_split=_LONG_SPLIT, waves=_WAVES)
    sinks = None if given.sinks is None else jnp.asarray(given.sinks)
    with emulated():
        from jaxserve_kernels.paged_attention.gpu import decode

        pool = (k, v, jnp.int32(LAYER), tables, lengths)
        attend = partial(decode.decode, scoring=case.scoring, sinks=sinks, tuning=sizes)
        found = np.asarray(jax.jit(attend)(q, *pool), np.float64)
    wanted = expected(case, given)
    assert (np.abs(found[: len(wanted)] - wanted) < TOLERANCES[case.dtype]).all()


@pytest.mark.parametrize(
    "case", [*PREFILL[::2], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in PREFILL[1::2])], ids=str
)
def test_prefill_equals_dense_softmax_in_any_order(case: Case) -> None:
    given = operands(case)
    q, k, v, tables, lengths, starts = (jnp.asarray(each) for each in given[:6])
    sizes = replace(prefill_tuning(_DEVICE, case.dim, k.dtype.itemsize), programs=NUM_PROGRAMS, stages=2)
    sinks = None if given.sinks is None else jnp.asarray(given.sinks)
    num_singles = case.num_decode_rows
    with emulated():
        from jaxserve_kernels.paged_attention.gpu import attention, prefill

        def attend(*pool: jax.Array) -> jax.Array:
            ragged = layout.ragged_layout(starts, jnp.int32(num_singles), num_tokens=len(q), tiling=attention.TILING)
            return prefill.prefill(q, *pool, ragged, scoring=case.scoring, sinks=sinks, tuning=sizes)

        found = np.asarray(jax.jit(attend)(k, v, jnp.int32(LAYER), tables, lengths), np.float64)
    own = slice(int(starts[num_singles]), int(starts[-1]))
    difference = found[own] - expected(case, given)[own]
    assert (np.abs(difference) < TOLERANCES[case.dtype]).all()
