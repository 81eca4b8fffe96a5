"""Models with recurrent layers: what their snapshots need, and the configs that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from jaxserve_kernels.segments import CHUNK

from jaxserve.errors import CheckpointError
from jaxserve.kv.states import UNIT_TOKENS
from jaxserve.model_config.recurrent import MambaConfig
from jaxserve.models.registry import decoder_config
from tests.models.goldens import golden_checkpoint
from tests.models.tiny_model import TinyModel


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
        ({"layer_types": ["conv", "linear_attention"]}, "conv and full_attention and sliding_attention only"),
        ({"attention_bias": True}, "attention_bias is true; supported: false"),
        ({"rope_parameters": {"rope_type": "default"}}, "tables full_attention and sliding_attention"),
    ],
)
def test_settings_of_lfm3_that_are_not_computed_are_refused(keys: dict[str, object], message: str) -> None:
    layers = {"layer_types": ["conv", "full_attention"]}
    with pytest.raises(CheckpointError, match=message):
        decoder_config({**LFM3, **layers, **keys})


FALCON_MAMBA_7B = {
    "architectures": ["FalconMambaForCausalLM"],
    "vocab_size": 65024,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "expand": 16,
    "num_hidden_layers": 64,
    "time_step_rank": 256,
    "tie_word_embeddings": False,
}


def test_a_width_beside_expand_is_that_of_the_mixer() -> None:
    mixer = decoder_config(FALCON_MAMBA_7B).recurrent
    assert isinstance(mixer, MambaConfig)
    assert (mixer.num_channels, mixer.step_rank, mixer.norm) == (8192, 256, "weightless")


def test_a_model_without_attention_is_served_with_any_context() -> None:
    decoder = decoder_config(FALCON_MAMBA_7B)
    assert [decoder.with_context(length).max_position for length in (None, 512, 1 << 20)] == [32768, 32768, 1 << 20]


JAMBA = {**LFM2, "architectures": ["JambaForCausalLM"], "num_hidden_layers": 8}


def test_layers_of_jamba_follow_from_two_periods() -> None:
    layers = decoder_config({**JAMBA, "attn_layer_period": 4, "attn_layer_offset": 2}).layers
    assert [index for index, layer in enumerate(layers) if layer.has_kv] == [2, 6]
    assert [index for index, layer in enumerate(layers) if layer.experts is not None] == [1, 3, 5, 7]
    assert not any(layer.experts for layer in decoder_config({**JAMBA, "num_experts": 1}).layers)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attn_layer_offset": 8}, "attn_layer_offset is 8; supported: an integer from 0 to 7"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms is false"),
        ({"layers_block_type": ["mamba"] * 8}, "what attn_layer_period and attn_layer_offset say"),
        ({"sliding_window": 8}, "sliding_window is 8"),
    ],
)
def test_jambas_that_are_not_computed_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({**JAMBA, **keys})


ZAYA = {**LFM2, "architectures": ["ZayaForCausalLM"], "head_dim": 16}
ZAYA_ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


def test_the_published_rope_tables_of_zaya_are_read() -> None:
    """They have a kind beside the tables, which says nothing."""
    decoder = decoder_config({**ZAYA, "rope_parameters": {"hybrid": ZAYA_ROPE, "rope_type": "default"}})
    assert (decoder.rope_theta, decoder.rotary_dim) == (5e6, 8)
    assert decoder_config(ZAYA) == decoder


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; supported: 1"),
        ({"attention_bias": True}, "attention_bias is true; supported: false"),
        ({"layer_types": ["hybrid", "hybrid_sliding"]}, "hybrid_sliding with a sliding_window"),
        ({"lm_head_bias": True}, "tie_word_embeddings is true; supported: false"),
        ({"rope_parameters": {"rope_type": "default"}}, "tables hybrid and hybrid_sliding"),
    ],
)
def test_settings_of_zaya_that_are_not_computed_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({**ZAYA, **keys})


@pytest.mark.slow
def test_a_token_may_have_no_expert() -> None:
    """Its block adds nothing; logits are those of transformers (`test_weight_formats`)."""
    golden = golden_checkpoint("zaya_tiny")
    model = TinyModel(golden.path)
    logits = model.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits[-8:], golden.logits, atol=1e-4, rtol=0)
    assert (model.experts[0] == 4).any()
    assert (model.experts[0] < 4).any()
