"""XLA's CPU kernels in every kind of layer. `make newest-kernels` runs these: engines of tests have XLA's kernels with the other jax."""

from __future__ import annotations

import pytest

from jaxserve.models.registry import decoder_of, open_model
from tests.models.goldens import golden_checkpoint
from tests.models.layer_kinds import names_of_all_choices
from tests.models.test_weight_formats import check, check_prompt
from tests.models.tiny_model import TinyModel
from tests.programs import compiled_quickly

pytestmark = [pytest.mark.slow, pytest.mark.newest]

NAMES = names_of_all_choices()
ONE_TOKEN_APART = [
    name
    for name in NAMES
    if (decoder := decoder_of(open_model(golden_checkpoint(name).path))).recurrent is not None
    or decoder.latent is not None
]
"""Recurrent layers and latent attention compute one token in another way than several."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONE_TOKEN_APART])
def test_logits_equal_transformers(name: str) -> None:
    """One program, which attends to the tokens of a step and to those in the cache."""
    golden = golden_checkpoint(name)
    with compiled_quickly():
        check_prompt(TinyModel(golden.path, cpu_kernels="xla"), golden)


@pytest.mark.parametrize(
    "name", [name if name in ONE_TOKEN_APART else pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES]
)
def test_logits_and_tokens_equal_transformers(name: str) -> None:
    with compiled_quickly():
        check(golden_checkpoint(name), "xla")
