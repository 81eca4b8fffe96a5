"""A tiny checkpoint of each newer family in llama.cpp's format is read like its safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import decoder_config, decoder_of, open_model
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import HIDDEN, write_decoder
from tests.unit.checkpoint.gguf_families import write_as_gguf


@pytest.mark.parametrize(
    "name",
    [
        "gemma2_tiny",
        "gemma3_tiny",
        "phi3_tiny",
        "phi3_longrope_tiny",
        "phi4_mini_tiny",
        "olmo2_tiny",
        "olmo3_tiny",
        "granite_tiny",
        "granitemoe_tiny",
        "granitemoeshared_odd_tiny",
        "glm4_moe_tiny",
        "qwen3_moe_tiny",
        "qwen2_moe_tiny",
        "mixtral_tiny",
        "olmoe_tiny",
        "gpt_oss_tiny",
    ],
)
def test_newer_families_are_read_as_their_safetensors(tmp_path: Path, name: str) -> None:
    folder = golden_checkpoint(name).path
    hf = json.loads((folder / "config.json").read_text())
    if "query_pre_attn_scalar" in hf:
        hf["query_pre_attn_scalar"] = hf["head_dim"]  # what no key carries, but of the 27B models
    if "swiglu_limit" in hf:
        hf["swiglu_limit"] = 7.0  # what no key carries
    checkpoint = open_model(folder)
    found = open_model(write_as_gguf(tmp_path / "a.gguf", checkpoint, hf))
    assert rounded(decoder_of(found)) == rounded(decoder_config(hf))
    assert found.tensors.keys() == checkpoint.tensors.keys()
    for tensor in checkpoint.tensors:
        expected = checkpoint.read(tensor).astype(np.float32)
        np.testing.assert_allclose(found.read(tensor).astype(np.float32), expected, atol=3e-7, rtol=0, err_msg=tensor)


def test_multi_token_prediction_layers_of_a_file_are_left_out(tmp_path: Path) -> None:
    folder = golden_checkpoint("glm4_moe_tiny").path
    hf, checkpoint = json.loads((folder / "config.json").read_text()), open_model(folder)
    found = open_model(write_as_gguf(tmp_path / "a.gguf", checkpoint, hf, num_mtp_layers=2))
    assert decoder_of(found) == decoder_config(hf)
    assert found.tensors.keys() == checkpoint.tensors.keys()


def test_attention_of_glm_follows_from_the_tensors_of_the_file(tmp_path: Path) -> None:
    """GLM-4.5 has norms of queries and keys, GLM-4.5-Air has none; a file whose whole heads rotate says so in its size."""
    options = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_count": 1}
    plain = decoder_of(open_model(write_decoder(tmp_path / "a.gguf", "glm4moe", **options)))
    norms = {f"blk.{layer}.attn_{part}_norm.weight": np.ones(8, np.float32) for layer in (0, 1) for part in "qk"}
    biases = {f"blk.0.attn_{part}.bias": np.ones(16, np.float32) for part in "qkv"}
    options["rope__dimension_count"] = 4
    other = decoder_of(open_model(write_decoder(tmp_path / "b.gguf", "glm4moe", norms | biases, **options)))
    assert (plain.qk_norm, plain.qkv_bias, plain.rotary_dim) == ("none", False, None)
    assert (other.qk_norm, other.qkv_bias, other.rotary_dim) == ("heads", True, 4)


def rounded(config: DecoderConfig) -> DecoderConfig:
    """Files have numbers in float32."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.attention_factor is not None:
        config = replace(config, rope_scaling=replace(scaling, attention_factor=round(scaling.attention_factor, 5)))
    return config


def test_gemmas_of_27b_score_with_width_over_heads(tmp_path: Path) -> None:
    for architecture, num_layers in (("gemma2", 46), ("gemma3", 62)):
        scales = []
        for count in (num_layers, num_layers - 1):
            options = {"block_count": count, "attention__sliding_window": 8, "attention__head_count": 2}
            options |= {"attention__key_length": 8, "attention__value_length": 8}
            scales.append(
                decoder_of(open_model(write_decoder(tmp_path / "a.gguf", architecture, **options))).attention_scale
            )
        assert scales == [(HIDDEN / 2) ** -0.5, 8**-0.5]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("gemma2", {"rope__freq_base_swa": 5.0}, "key 'gemma2.rope.freq_base_swa': expected the base of all layers"),
        (
            "gemma3",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True]},
            "key 'gemma3.attention.sliding_window_pattern': expected true or false for each of the 2 layers",
        ),
        ("granite", {"rope__scaling__finetuned": False}, "key 'granite.rope.scaling.finetuned': expected true or none"),
        ("granite", {"attention__sliding_window": 8}, "key 'granite.attention.sliding_window': expected none"),
        (
            "granitemoe",
            {"expert_count": 4, "expert_used_count": 2, "rope__scaling__finetuned": False},
            "key 'granitemoe.rope.scaling.finetuned': expected true or none",
        ),
        ("granitemoe", {}, "key 'granitemoe.expert_count': expected a whole number"),
        (
            "glm4moe",
            {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 1},
            "key 'glm4moe.expert_gating_func': expected 2 (sigmoid) or none, found 1",
        ),
        (
            "glm4moe",
            {"expert_count": 4, "expert_used_count": 2, "rope__dimension_sections": [4, 2, 2, 0]},
            "key 'glm4moe.rope.dimension_sections': expected none",
        ),
        (
            "glm4moe",
            {"expert_count": 4, "expert_used_count": 2, "nextn_predict_layers": 2},
            "key 'glm4moe.nextn_predict_layers': expected a whole number from 0 to 1, found 2",
        ),
        ("phi3", {"rope__dimension_count": 3}, "key 'phi3.rope.dimension_count': expected the head size 8, found 3"),
    ],
)
def test_keys_that_are_not_computed_are_rejected(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model(write_decoder(tmp_path / "a.gguf", architecture, **changes))
    assert expected in str(caught.value)


def test_two_tensors_in_one_place_are_rejected(tmp_path: Path) -> None:
    extra = {f"blk.0.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("post_attention_norm", "post_ffw_norm")}
    with pytest.raises(CheckpointError, match="no place in it"):
        open_model(write_decoder(tmp_path / "a.gguf", "olmo2", extra))
