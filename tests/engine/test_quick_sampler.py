"""The sampler of engines of tests: it draws from the model's distribution, and takes no request that needs another option."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.params import EngineSamplingParams, device_row
from tests.engine.quick_sampler import needs_other_options, sample


@pytest.mark.parametrize(
    "option",
    [
        {"max_tokens": 5, "ignore_eos": True, "stop_token_ids": (3,)},
        {"temperature": 1.0, "seed": 3},
        {"num_top_logprobs": 3, "num_prompt_logprobs": 2},
    ],
    ids=str,
)
def test_draws_and_what_the_host_decides_need_no_other_option(option: dict[str, Any]) -> None:
    assert not needs_other_options(EngineSamplingParams(**{"temperature": 0.0} | option))


@pytest.mark.parametrize("option", [{"frequency_penalty": 0.5}, {"min_tokens": 3}, {"top_k": 4}], ids=str)
def test_what_the_device_decides_needs_the_real_sampler(option: dict[str, Any]) -> None:
    assert needs_other_options(EngineSamplingParams(**{"temperature": 0.0} | option))


def test_a_row_is_drawn_from_its_distribution_by_its_seed_and_position_only() -> None:
    shares, count = np.array([0.5, 0.3, 0.15, 0.05], np.float32), 4096
    greedy, drawn = (device_row(EngineSamplingParams(temperature=value, seed=7)) for value in (0.0, 1.0))
    columns, positions = np.stack([greedy, *[drawn] * count]), np.arange(count + 1, dtype=np.int32)
    logits = jnp.tile(jnp.log(shares), (count + 1, 1))
    found = sample(logits, jnp.array(columns), {}, jnp.array(positions), jnp.int32(2))
    tokens = np.asarray(found.token_ids)
    assert tokens[0] == 0
    np.testing.assert_allclose(np.bincount(tokens[1:]) / count, shares, atol=0.03)
    np.testing.assert_allclose(found.logprobs, np.log(shares)[tokens], atol=1e-5)
    few = sample(logits[5:7], jnp.array(columns[5:7]), {}, jnp.array(positions[5:7]), jnp.int32(2))
    assert few.token_ids.tolist() == tokens[5:7].tolist()
