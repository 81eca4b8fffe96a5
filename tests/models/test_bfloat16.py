"""Layers in bfloat16 against the float32 of transformers, for every kind of layer."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.models.registry import decoder_of, open_model
from tests.models.goldens import golden_checkpoint
from tests.models.layer_kinds import names_of_all_choices
from tests.models.test_decoder import prompt_logits

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize("name", names_of_all_choices())
def test_bfloat16_logits_stay_close_to_the_float32_reference(name: str) -> None:
    """Every kind of layer is among these checkpoints."""
    golden = golden_checkpoint(name)
    found = prompt_logits(golden, "bfloat16")
    assert found.dtype == np.float32
    spread, latent = golden.logits.std(), decoder_of(open_model(golden.path)).latent
    has_indexer = latent is not None and latent.indexer is not None  # rounded scores choose other tokens, of 8 each
    assert np.abs(found - golden.logits).mean() < (0.25 if has_indexer else 0.05) * spread
