"""The emulator can be trusted: where a kernel lacks one of its waits, arrivals or fences, it says so.

One kernel of matmuls with experts has all of them: a ring that is filled by bulk copies, matmuls that are waited for
late, results that leave through shared memory. Its PTX is run as it is, and with instructions left out.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jaxserve_kernels.grouped_matmul.cases import Case, operands
from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning

from tests.ptx.launch import emulated
from tests.ptx.machine import Schedule
from tests.ptx.mutants import Mutants

pytestmark = [pytest.mark.aot, pytest.mark.slow]

CASE = Case((3, 0, 20), 128, 256)
SIZES = GroupedTuning(rows=64, outputs=64, inputs=64, stages=2, programs=2)
SCHEDULES = [
    Schedule(seed=0, copies=0.3, matmuls=0.3),
    Schedule(seed=1, copies=0.03, matmuls=0.0),
    Schedule(seed=2, copies=0.005, matmuls=0.2),
]


@pytest.fixture(scope="module")
def mutants() -> Mutants:
    x, weight, group_sizes, _ = operands(CASE)
    with emulated(SCHEDULES) as launches:
        from jaxserve_kernels.grouped_matmul.gpu import whole

        whole.grouped_matmul(*map(jnp.asarray, (x, weight, group_sizes)), tuning=SIZES)
    return Mutants(launches[-1], SCHEDULES)


def test_the_kernel_as_it_is_makes_the_same_in_any_order(mutants: Mutants) -> None:
    assert not mutants.is_caught(lambda instruction: False)


@pytest.mark.parametrize(
    "opcode",
    [
        "fence.proxy.async",
        "wgmma.fence",
        "mbarrier.arrive.release",
        "mbarrier.arrive.expect_tx",
        "cp.async.bulk.tensor.4d.shared",
    ],
)
def test_any_single_one_that_is_missing_is_caught(mutants: Mutants, opcode: str) -> None:
    for missing in mutants.of(opcode):
        assert mutants.is_caught(missing.__eq__), missing


@pytest.mark.parametrize(
    ("opcode", "in_fetcher"),
    [
        ("mbarrier.try_wait", True),  # for slots of the ring that are free
        ("mbarrier.try_wait", False),  # for slots that are filled
        ("cp.async.bulk.wait_group", False),
        ("wgmma.wait_group", False),
    ],
    ids=["free", "filled", "stored", "multiplied"],
)
def test_missing_waits_are_caught(mutants: Mutants, opcode: str, in_fetcher: bool) -> None:
    missing = mutants.of(opcode, in_fetcher=in_fetcher)
    assert mutants.is_caught(lambda instruction: instruction in missing)
