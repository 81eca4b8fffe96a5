"""Attention over latent vectors by the PTX that the compiler makes of its kernel, in several orders of events."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.latent_attention import write_and_attend
from jaxserve_kernels.latent_attention.cases import CASES, LAYER, Case, error, operands
from jaxserve_kernels.paged_attention import Paging, ragged_layout

from tests.ptx.launch import emulated
from tests.ptx.machine import Schedule
from tests.ptx.mutants import Mutants

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SCHEDULES = [
    Schedule(seed=0, copies=0.3, matmuls=0.3),
    Schedule(seed=1, copies=0.03, matmuls=0.0),
    Schedule(seed=2, copies=0.005, matmuls=0.2),
]
MUTATED = Case((1, 1, 1), (5, 0, 330), num_heads=5, width=320, value_width=256)
"""Seven tiles and several units for each of two programs, with a ring of two tiles."""
IN_CI = (CASES[2], CASES[6], CASES[8])
"""Decode, drafts to verify, and a cache of 8 bits."""


@pytest.mark.parametrize(
    "case",
    [each if each in IN_CI else pytest.param(each, marks=pytest.mark.exhaustive) for each in CASES],
    ids=str,
)
def test_the_kernel_equals_dense_softmax_in_any_order(case: Case) -> None:
    given = operands(case)
    q, pages, tables, lengths, starts = map(jnp.asarray, given)
    options = {"value_width": case.value_width, "scoring": case.scoring, "tuning": case.few_programs}
    with emulated():
        from jaxserve_kernels.latent_attention.gpu import attention

        def attend(*pool: jax.Array) -> jax.Array:
            if case.rows.is_decode:
                return attention.decode_attention(q, *pool, **options)
            ragged = ragged_layout(starts, jnp.int32(case.rows.num_decode_rows), num_tokens=len(q))
            return attention.mixed_attention(q, *pool, ragged, **options)

        found = np.asarray(attend(pages, jnp.int32(LAYER), tables, lengths))
    assert error(case, given, found) <= 1


@pytest.fixture(scope="module")
def mutants() -> Mutants:
    q, pages, tables, lengths, _ = map(jnp.asarray, operands(MUTATED))
    with emulated(SCHEDULES) as launches:
        from jaxserve_kernels.latent_attention.gpu import decode

        pool = (pages, jnp.int32(LAYER), tables, lengths)
        tuning = replace(MUTATED.few_programs, stages=2)
        decode.decode(q, *pool, value_width=MUTATED.value_width, scoring=MUTATED.scoring, tuning=tuning)
    return Mutants(launches[0], SCHEDULES)


def test_the_kernel_as_it_is_makes_the_same_in_any_order(mutants: Mutants) -> None:
    assert not mutants.is_caught(lambda instruction: False)


@pytest.mark.parametrize("opcode", ["fence.proxy.async", "mbarrier.arrive.release", "cp.async.bulk.tensor.4d.shared"])
def test_any_single_one_that_is_missing_is_caught(mutants: Mutants, opcode: str) -> None:
    """Without them workers, which share weights and the place of queries and sums, would read what is not there yet."""
    for missing in mutants.of(opcode):
        assert mutants.is_caught(missing.__eq__), missing


@pytest.mark.parametrize(
    ("opcode", "in_fetcher"),
    [("mbarrier.try_wait", True), ("mbarrier.try_wait", False), ("cp.async.bulk.wait_group", False)],
    ids=["free", "filled", "stored"],
)
def test_missing_waits_are_caught(mutants: Mutants, opcode: str, in_fetcher: bool) -> None:
    missing = mutants.of(opcode, in_fetcher=in_fetcher)
    assert mutants.is_caught(lambda instruction: instruction in missing)


@pytest.mark.parametrize("most_bytes", [256 << 20, 0], ids=["by-the-kernel", "segments-by-the-reference"])
def test_a_mixed_step_writes_its_vectors_and_attends_to_them(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ragged` is cut as the other kernels for Hopper take it: segments by the reference cut it anew."""
    case = Case((1, 1, 5, 40, 0), (70, 1, 90, 40, 0), num_heads=4, width=320, value_width=256, padding=2)
    given = operands(case)
    rows = np.repeat(np.arange(5), case.counts)
    positions = np.concatenate(
        [np.arange(length - count, length) for count, length in zip(case.counts, case.lengths, strict=True)]
    )
    pages, slots = np.zeros((2, len(given.q)), np.int32)  # padding goes to the null page
    pages[: len(rows)], slots[: len(rows)] = given.tables[rows, positions // case.page_size], positions % case.page_size
    before, new = given.pages.copy(), given.pages[LAYER, pages, :, slots]
    before[LAYER, pages, :, slots] = 400
    starts = jnp.asarray(given.query_starts)
    with emulated(SCHEDULES[:1]):
        from jaxserve_kernels.latent_attention.gpu import attention

        monkeypatch.setattr(attention, "_MOST_BYTES", most_bytes)
        ragged = ragged_layout(
            starts, jnp.int32(case.rows.num_decode_rows), num_tokens=len(given.q), backend="mosaic_gpu"
        )
        where = (given.tables, given.lengths, starts, pages, slots)
        found, written = write_and_attend(
            *map(jnp.asarray, (given.q, new, before)),
            jnp.int32(LAYER),
            Paging(*map(jnp.asarray, where), ragged),
            value_width=case.value_width,
            scoring=case.scoring,
            backend="mosaic_gpu",
        )
    assert error(case, given, found) <= 1
    np.testing.assert_array_equal(np.asarray(written)[:, 1:].view(np.uint16), given.pages[:, 1:].view(np.uint16))
