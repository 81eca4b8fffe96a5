"""XLA's CPU kernels in every kind of layer. `make newest-kernels` runs these: engines of tests have XLA's kernels with the other jax."""

from __future__ import annotations

import pytest

from tests.models.goldens import golden_checkpoint
from tests.models.layer_kinds import names_of_all_choices
from tests.models.test_weight_formats import check

pytestmark = [pytest.mark.slow, pytest.mark.newest]


@pytest.mark.parametrize("name", names_of_all_choices())
def test_logits_and_tokens_equal_transformers(name: str) -> None:
    check(golden_checkpoint(name), "xla")
