"""Places for adapters exist for every model that may have adapters."""

from __future__ import annotations

import pytest

from jaxserve.checkpoint.adapted import with_adapters
from jaxserve.checkpoint.peft_modules import declared_module
from jaxserve.config import ModelConfig
from jaxserve.executor.adapters import adapters_config
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.weights.loader import check_tensors
from tests.models.goldens import DATA, golden_names
from tests.models.test_adapters import PLAIN

pytestmark = pytest.mark.slow

SETTINGS = ModelConfig(model="any", max_loras=1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if "_odd_" in name else []) for name in golden_names()],
)
def test_reserved_places_have_tensors_in_every_model(name: str) -> None:
    checkpoint = open_model(DATA / name)
    decoder = decoder_of(checkpoint)
    room = adapters_config((), SETTINGS, decoder)
    assert room is not None
    tensors, skeleton = with_adapters(checkpoint, [None], room.rank, room.modules), make_skeleton(decoder, PLAIN, room)
    check_tensors(tensors, skeleton)
    changed = {
        declared_module(name.split(".lora_")[0]) for leaf in skeleton.leaves for name in leaf.tensors if leaf.is_adapter
    }
    assert any(module.endswith("_proj") for module in changed)
    assert any(".experts." in module for module in changed) == (decoder.experts is not None)
    if decoder.recurrent is not None:
        found = {module.rpartition(".")[2] for module in changed if f".{decoder.recurrent.module}." in module}
        assert found == set(decoder.recurrent.projections)
