"""The experts that tokens choose are those of transformers, in one chunk and token by token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.goldens import golden_checkpoint, routing_goldens
from tests.models.tiny_model import TinyModel

pytestmark = pytest.mark.slow

ROUTING = routing_goldens()
LIKE_OTHERS = ("granitemoe_tiny", "mixtral_tiny", "qwen3_moe_tiny")
"""Choose by a softmax, as others do."""


@pytest.mark.parametrize(
    ("name", "chunk"),
    [
        *(pytest.param(name, 103, marks=[pytest.mark.exhaustive] if name in LIKE_OTHERS else []) for name in ROUTING),
        pytest.param("deepseek_v3_tiny", 37, marks=pytest.mark.versions),
    ],
)
def test_experts_of_every_token_are_those_of_transformers(name: str, chunk: int) -> None:
    golden = golden_checkpoint(name)
    tokens = np.array([*golden.prompt_ids, *golden.output_ids[:-1]])
    model = TinyModel(golden.path)
    for start in range(0, len(tokens), chunk):
        model.logits(tokens[start : start + chunk])
    found = np.concatenate(model.experts, axis=1).swapaxes(0, 1)  # (T, L, k)
    assert np.array_equal(np.sort(found, axis=2), ROUTING[name])
