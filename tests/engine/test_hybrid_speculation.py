"""Drafts change no token of a model with recurrent states: states go back to the last token that is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jaxserve.runner.speculation.draft_model import ModelDrafter
from jaxserve.runner.speculation.rows import Verified
from tests.engine.model_engine import ModelEngine, request
from tests.engine.test_speculation import check_drafts_change_nothing
from tests.models.goldens import GoldenCheckpoint, golden_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("speculates")]  # real models
NUM_DRAFTS = 3
MISTAKE = 5
"""Every so many tokens, a draft is wrong."""


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_next_tiny", "native"),
        pytest.param(("granitemoehybrid_tiny", "xla"), marks=pytest.mark.exhaustive),
        pytest.param(("lfm2_odd_tiny", "xla"), marks=pytest.mark.exhaustive),
        pytest.param(("falcon_h1_tiny", "native"), marks=pytest.mark.exhaustive),
    ],
    ids=lambda param: param[0],
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[GoldenCheckpoint, ModelEngine]]:
    """Gated delta nets, Mamba-2, a short convolution, and Mamba-2 beside attention, with a drafter that is right four times of five."""
    name, kernels = request.param
    golden = golden_checkpoint(name)
    known = np.concatenate([golden.prompt_ids, golden.output_ids])
    given = np.where(np.arange(len(known)) % MISTAKE == 0, known ^ 1, known)
    given = jnp.asarray(np.pad(given, (0, NUM_DRAFTS + 1)), jnp.int32)

    def draft(self: ModelDrafter, verified: Verified, cache: Any) -> tuple[Array, Any]:
        following = verified.accepted.position[:, None] + jnp.arange(1, 1 + NUM_DRAFTS)
        return given[jnp.minimum(following, len(given) - 1)], cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelDrafter, "draft", draft)
        engine = ModelEngine(
            golden.path,
            draft_model=golden_checkpoint("smollm2_tiny").path,
            num_speculative_tokens=NUM_DRAFTS,
            cpu_kernels=kernels,
        )
        yield golden, engine
        engine.close()


def test_states_go_back_to_the_last_accepted_token(served: tuple[GoldenCheckpoint, ModelEngine]) -> None:
    """All drafts of a step are right, some, or none; rows of both kinds share steps; snapshots of prompts stay what they were."""
    golden, engine = served
    length = len(golden.output_ids)
    for options in ({}, {"overlap": False}, {"max_num_batched_tokens": 7}):
        engine.restart(num_speculative_tokens=NUM_DRAFTS, **options)  # type: ignore[arg-type]
        for _ in range(2):  # the second time, the prompts may begin at snapshots
            others = [request("other", range(60, 63), max_tokens=9)]
            same = [request(str(i), golden.prompt_ids, max_tokens=length - 2 * i) for i in range(2)]
            found = engine.run([*same, *others])
            assert found["0"].token_ids == golden.output_ids.tolist(), options
            assert found["1"].token_ids == golden.output_ids[: length - 2].tolist(), options
        accepted = engine.num_accepted_tokens / engine.num_draft_tokens
        assert 0.3 < accepted < 0.9, "right and wrong ones"
    assert engine.executor.compilations()["serving"] == 0


def test_tokens_and_log_probabilities_are_those_without_drafts(
    served: tuple[GoldenCheckpoint, ModelEngine],
) -> None:
    check_drafts_change_nothing(served[1], NUM_DRAFTS, num_cached=0)  # prompts as short as these have no snapshots
