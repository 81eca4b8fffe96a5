"""The fake executor raises for invalid plans and pages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxserve.executor.fake.executor import powers_of_two
from jaxserve.executor.fake.models import PoisonError, next_token
from jaxserve.scheduler.plan import StepPlan
from tests.engine.rig import Rig, add, prompt


def planned(rig: Rig) -> StepPlan:
    rig.send(add("r", prompt(6)))
    plan = rig.scheduler.schedule()
    assert plan is not None
    return plan


def test_next_token_is_computed_by_hand() -> None:
    assert next_token([5, 7, 11], 100) == (1 * 5 + 2 * 7 + 3 * 11) % 100
    assert next_token([5, 7, 11], 100, seed=2) == (52 + 3 * (31 * 3 + 7)) % 100


def test_order_seed_and_position_matter() -> None:
    assert next_token([1, 2], 101) != next_token([2, 1], 101)
    assert next_token([1, 2], 101, seed=0) != next_token([1, 2], 101, seed=1)
    assert next_token([0], 101, seed=3) != next_token([0, 0], 101, seed=3)


def test_reading_a_slot_that_was_never_written_raises() -> None:
    rig = Rig()
    plan = planned(rig)
    skipped = dataclasses.replace(plan, num_computed_tokens=np.array([1], np.int32))
    with pytest.raises(PoisonError, match="hold nothing"):
        rig.executor.submit(skipped).result()


def test_reading_a_wiped_page_raises() -> None:
    rig = Rig()
    rig.send(add("r", prompt(6)))
    rig.step()
    rig.model.poison(rig.scheduler.running[0].table.blocks[:1])
    with pytest.raises(PoisonError, match="hold nothing"):
        rig.step()


def test_writing_through_the_null_block_raises() -> None:
    rig = Rig()
    plan = planned(rig)
    with pytest.raises(PoisonError, match="no page for position 0"):
        rig.executor.submit(dataclasses.replace(plan, block_tables=np.zeros_like(plan.block_tables))).result()


def test_two_writes_to_one_slot_raise() -> None:
    rig = Rig()
    plan = planned(rig)
    tables = plan.block_tables.copy()
    tables[0, 1] = tables[0, 0]
    with pytest.raises(PoisonError, match="written twice"):
        rig.executor.submit(dataclasses.replace(plan, block_tables=tables)).result()


def test_penalized_row_without_counted_tokens_raises() -> None:
    rig = Rig()
    rig.send(add("r", prompt(6), presence_penalty=1.0))
    plan = rig.scheduler.schedule()
    assert plan is not None
    assert [(init.slot, init.token_ids.tolist(), init.num_prompt_tokens) for init in plan.slot_inits] == [
        (plan.slots[0], prompt(6), 6)
    ]
    with pytest.raises(PoisonError, match="counted None"):
        rig.executor.submit(dataclasses.replace(plan, slot_inits=())).result()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bucket": 7}, "no program mixed/7"),
        ({"bucket": 4}, "do not fit mixed/4"),
        ({"kind": "decode"}, "no decode step"),
    ],
)
def test_plan_without_a_program_is_rejected(change: dict[str, object], text: str) -> None:
    rig = Rig()
    with pytest.raises(ValueError, match=text):
        rig.executor.submit(dataclasses.replace(planned(rig), **change))  # type: ignore[arg-type]


def test_chosen_step_fails() -> None:
    rig = Rig(fail_at_steps=frozenset({1}))
    rig.send(add("r", prompt(6)))
    rig.step()
    with pytest.raises(RuntimeError, match="step 1 fails on purpose"):
        rig.step()


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))])
def test_buckets_reach_the_largest_size(largest: int, sizes: tuple[int, ...]) -> None:
    assert powers_of_two(largest) == sizes
