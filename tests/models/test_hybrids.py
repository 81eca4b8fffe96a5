"""Models with recurrent layers: what their snapshots need, and the configs that are refused."""

from __future__ import annotations

import pytest
from jaxserve_kernels.segments import CHUNK

from jaxserve.errors import CheckpointError
from jaxserve.kv.states import UNIT_TOKENS
from jaxserve.models.registry import decoder_config


def test_snapshots_are_at_borders_of_chunks() -> None:
    assert UNIT_TOKENS % CHUNK == 0


LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


LFM3 = {**LFM2, "architectures": ["Lfm3ForCausalLM"]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["conv", "conv"]}, "at least one layer of full_attention"),
        ({"layer_types": ["conv", "sliding_attention"]}, "conv and full_attention only"),
        ({"layer_types": ["conv"]}, "a list with one entry for each of the 2 layers"),
        ({"conv_L_cache": 1}, "an integer from 2 to 64"),
    ],
)
def test_layers_that_are_not_computed_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({**LFM2, **keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["conv", "conv"]}, "at least one layer of full_attention"),
        ({"layer_types": ["conv", "linear_attention"]}, "conv and full_attention and sliding_attention only"),
        ({"attention_bias": True}, "attention_bias is true; supported: false"),
        ({"rope_parameters": {"rope_type": "default"}}, "tables full_attention and sliding_attention"),
    ],
)
def test_settings_of_lfm3_that_are_not_computed_are_refused(keys: dict[str, object], message: str) -> None:
    layers = {"layer_types": ["conv", "full_attention"]}
    with pytest.raises(CheckpointError, match=message):
        decoder_config({**LFM3, **layers, **keys})
