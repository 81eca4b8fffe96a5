"""Engines of tests without a sampler take no request that needs one."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.sampling.params import EngineSamplingParams
from tests.engine.greedy import is_greedy


def test_what_the_host_decides_needs_no_sampler() -> None:
    assert is_greedy(EngineSamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, stop_token_ids=(3,)))


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 1.0},
        {"frequency_penalty": 0.5},
        {"min_tokens": 3},
        {"num_top_logprobs": 0},
        {"num_prompt_logprobs": 2},
    ],
    ids=str,
)
def test_what_the_device_decides_needs_the_sampler(option: dict[str, Any]) -> None:
    assert not is_greedy(EngineSamplingParams(**{"temperature": 0.0} | option))
