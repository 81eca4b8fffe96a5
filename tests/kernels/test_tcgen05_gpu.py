"""Attention of segments by the kernel on `tcgen05`, interpreted with the race detector on.

The interpreter's scores and weights do not share memory; other cases are computed by the kernel's PTX, where they do, with
other detectors of races: tests/ptx/blackwell.py.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention import layout
from jaxserve_kernels.paged_attention.cases import CASES, LAYER, TOLERANCES, Case, expected, operands
from jaxserve_kernels.paged_attention.tuning import prefill_tuning

from tests.kernels.gpu_interpreter import gpu_interpreter


@pytest.mark.parametrize(
    "case",
    [
        CASES[12],
        pytest.param(CASES[14], marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param(Case((130,), (500,), 3, 1, dim=128, scale=1.0, dtype="float16"), marks=pytest.mark.slow),
        pytest.param(
            Case((3, 40), (167, 50), num_heads=5, num_kv_heads=1, softcap=10.0, has_sinks=True), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_segments_on_tcgen05_equal_dense_softmax_without_a_race(case: Case) -> None:
    given = operands(case)
    q, k, v, tables, lengths, starts = (jnp.asarray(each) for each in given[:6])
    sizes = replace(prefill_tuning("b200", case.dim, k.dtype.itemsize), programs=2)
    sinks = None if given.sinks is None else jnp.asarray(given.sinks)
    with gpu_interpreter() as has_raced:
        from jaxserve_kernels.paged_attention.gpu import tcgen05, tcgen05_attention

        first, tiling = jnp.int32(case.num_decode_rows), tcgen05_attention.TILING
        ragged = layout.ragged_layout(starts, first, num_tokens=len(q), tiling=tiling)
        options = {"scoring": case.scoring, "sinks": sinks, "tuning": sizes, "is_emulated": True}
        out = tcgen05.prefill(q, k, v, jnp.int32(LAYER), tables, lengths, ragged, **options)
        found = np.asarray(out, np.float64)
        assert not has_raced()
    own = slice(int(starts[case.num_decode_rows]), int(starts[-1]))
    assert (np.abs(found[own] - expected(case, given)[own]) < TOLERANCES[case.dtype]).all()
