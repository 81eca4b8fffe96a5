"""Plans cross to other hosts unchanged, but for the ids of requests."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from jaxserve.executor.hosts.plans import decode_order, encode_order
from jaxserve.runner.inputs import Program, dummy_plan, pack
from jaxserve.runner.slots import slot_row
from jaxserve.sampling.params import EngineSamplingParams, SlotInit
from jaxserve.scheduler.plan import EmbedPlan, Mask, StepPlan
from jaxserve.types import RequestId

PROGRAM = Program("mixed", 16, 4, 8, 4)
VOCAB = 384


def full_plan() -> StepPlan:
    options = EngineSamplingParams(
        logit_bias={3: 1.5}, bad_words=((1, 2), (4,)), min_tokens=2, seed=-(2**63), allowed_token_ids=(5, 6)
    )
    init = SlotInit(1, options, np.arange(3, dtype=np.int32), 2, frozenset({3, 7}))
    plan = dummy_plan(PROGRAM)
    targets = np.arange(plan.num_tokens, dtype=np.int32)
    adapters = np.ones(len(plan.request_ids), np.int32)
    return replace(
        plan, slot_inits=(init,), masks=(Mask(2, np.arange(12, dtype=np.int32)),), targets=targets, adapters=adapters
    )


def test_a_plan_gives_another_host_the_same_inputs() -> None:
    plan = full_plan()
    found = decode_order(encode_order(plan))
    assert isinstance(found, StepPlan)
    assert found.request_ids == ("",) * len(plan.request_ids)
    np.testing.assert_array_equal(pack(found, PROGRAM), pack(plan, PROGRAM))
    (init,), (expected,) = found.slot_inits, plan.slot_inits
    np.testing.assert_array_equal(slot_row(init, VOCAB), slot_row(expected, VOCAB))
    (mask,) = found.masks
    assert mask.slot == 2 and mask.words.tolist() == list(range(12))
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, np.ndarray):
            assert getattr(found, field.name).dtype == value.dtype, field.name


def test_texts_and_commands_cross() -> None:
    counts = np.array([2, 0], np.int32)
    plan = EmbedPlan(8, (RequestId("a"), RequestId("b")), counts, np.array([5, 6], np.int32), counts)
    found = decode_order(encode_order(plan))
    assert isinstance(found, EmbedPlan)
    assert (found.bucket, found.token_ids.tolist(), found.num_text_tokens.tolist()) == (8, [5, 6], [2, 0])
    assert decode_order(encode_order("start_profile")) == "start_profile"


@pytest.mark.parametrize("frame", [b"", b"x", b"s\xc1", b"c\xa4quit"])
def test_a_frame_of_another_kind_is_an_error(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_order(frame)
