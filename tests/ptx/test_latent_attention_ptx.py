"""Attention over latent vectors by the PTX that the compiler makes of its kernel, in several orders of events."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.latent_attention.cases import CASES, LAYER, Case, error, operands
from jaxserve_kernels.paged_attention import ragged_layout

from tests.ptx.launch import emulated
from tests.ptx.machine import Schedule
from tests.ptx.mutants import Mutants

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SCHEDULES = [
    Schedule(seed=0, copies=0.3, products=0.3),
    Schedule(seed=1, copies=0.03, products=0.0),
    Schedule(seed=2, copies=0.005, products=0.2),
]
MUTATED = Case((1, 1, 1), (5, 0, 330), num_heads=5, width=320, value_width=256)
"""Seven tiles and several units for each of two programs, with a ring of two tiles."""


@pytest.mark.parametrize("case", CASES, ids=str)
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
