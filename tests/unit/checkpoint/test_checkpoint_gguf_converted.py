"""A tiny checkpoint of each family, converted as llama.cpp does, is read like its safetensors; keys that are not computed are refused."""

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
from tests.unit.checkpoint.gguf_converted import CONVERSIONS, converted, with_joined_qkv

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
IN_A_FILE: dict[str, dict[str, Any]] = {
    "exaone4_tiny": {"rope_scaling": LLAMA3},
    "apertus_tiny": {"rope_parameters": LLAMA3 | {"rope_theta": 10_000.0}},
    "qwen3_moe_tiny": {"architectures": ["Qwen3VLMoeTextModel"]},
    "gemma3n_tiny": {"vocab_size_per_layer_input": 320},
    "hunyuan_tiny": {"max_position_embeddings": 256 * 1024},
    "hunyuan_moe_tiny": {"max_position_embeddings": 256 * 1024},
    "starcoder2_tiny": {"sliding_window": 4096},
    "phimoe_tiny": {
        "router_jitter_noise": 0.01,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 256,
            "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.25],
            "long_factor": [1.0, 2.5, 4.0, 5.5, 7.0, 8.5],
        },
    },
    **{key: {"max_position_embeddings": 2048} for key in ("falcon_tiny", "falcon_new_tiny")},
    **{
        key: {"max_position_embeddings": 1 << 15}
        for key in ("mamba_tiny", "mamba_odd_tiny", "mamba2_tiny", "mamba2_odd_tiny", "falcon_mamba_tiny")
    },
    "kimi_linear_odd_tiny": {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": 40,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
        "first_k_dense_replace": 0,
        "num_expert_group": 1,
        "topk_group": 1,
    },
    "cohere2_moe_tiny": {
        "expert_selection_fn": "sigmoid",
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "step3p5_tiny": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "high_freq_factor": 32.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 131_072,
        }
    },
    "mistral4_odd_tiny": {"rope_interleave": True},
    "mimo_v2_flash_tiny": {"routed_scaling_factor": 1.0},
    "falcon_mamba_odd_tiny": {"max_position_embeddings": 1 << 15, "mixer_rms_eps": 1e-6},
    "dbrx_odd_tiny": {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 1}},
    "bailing_moe_tiny": {"sliding_window": None},
    "exaone_tiny": {"rope_scaling": LLAMA3},
    "internlm2_tiny": {"rope_scaling": None},
    "nemotron_nas_tiny": {"rope_scaling": LLAMA3},
    "minicpm_tiny": {"sparse_config": None, "scale_depth": 0.5**0.5},
    "minicpm3_tiny": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
}
"""Changes of configs to what files can hold: their keys lack the rest, which published models share."""


def in_a_file(name: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a tiny checkpoint and its config with what a file can hold."""
    folder = golden_checkpoint(name).path
    return folder, json.loads((folder / "config.json").read_text()) | IN_A_FILE.get(name, {})


def rounded(config: DecoderConfig) -> DecoderConfig:
    """Files have numbers in float32."""
    config, scaling = replace(config, rope_theta=float(f"{config.rope_theta:.6g}")), config.rope_scaling
    if scaling is None or scaling.attention_factor is None:
        return config
    return replace(config, rope_scaling=replace(scaling, attention_factor=round(scaling.attention_factor, 5)))


@pytest.mark.parametrize(
    "name",
    [
        "laguna_tiny",
        "hy_v3_tiny",
        "granite_swa_tiny",
        "mellum_tiny",
        "cohere2_moe_tiny",
        "gemma4_unified_tiny",
        "step3p5_tiny",
        "glm_moe_dsa_tiny",
        "deepseek_v32_tiny",
        "kimi_linear_tiny",
        "kimi_linear_odd_tiny",
        "mistral4_tiny",
        "mistral4_odd_tiny",
        "mimo_v2_flash_tiny",
        "gpt2_tiny",
        "gpt2_odd_tiny",
        "gpt_bigcode_tiny",
        "gpt_neox_tiny",
        "gpt_neox_sequential_tiny",
        "falcon_tiny",
        "falcon_new_tiny",
        "mamba_tiny",
        "mamba_odd_tiny",
        "falcon_mamba_tiny",
        "falcon_mamba_odd_tiny",
        "mamba2_tiny",
        "mamba2_odd_tiny",
        "jamba_tiny",
        "jamba_odd_tiny",
        "afmoe_tiny",
        "exaone_moe_tiny",
        "jais2_tiny",
        "glm_tiny",
        "phimoe_tiny",
        "minicpm3_tiny",
        "youtu_tiny",
        "dbrx_tiny",
        "dbrx_odd_tiny",
        "bamba_tiny",
        "bamba_odd_tiny",
        "bailing_moe_tiny",
        "bailing_moe_v2_tiny",
        "exaone_tiny",
        "internlm2_tiny",
        "minicpm_tiny",
        "nemotron_nas_tiny",
        "internlm3_tiny",
        "iquestcoder_tiny",
        "gemma4_tiny",
        "gemma4_moe_odd_tiny",
        "gemma3n_tiny",
        "ministral3_tiny",
        "glm4_tiny",
        "ernie4_5_tiny",
        "ernie4_5_moe_tiny",
        "hunyuan_moe_tiny",
        "minimax_m2_tiny",
        "seed_oss_tiny",
        "exaone4_tiny",
        "hunyuan_tiny",
        "cohere_tiny",
        "cohere2_tiny",
        "phi_tiny",
        "apertus_tiny",
        "qwen2_tiny",
        "qwen3_tiny",
        "qwen3_moe_tiny",
        "solar_open_tiny",
        "starcoder2_tiny",
        "stablelm_tiny",
        "stablelm_parallel_tiny",
        "nemotron_tiny",
    ],
)
def test_converted_files_are_read_as_their_safetensors(tmp_path: Path, name: str) -> None:
    folder, hf = in_a_file(name)
    expected, found = open_model(folder), open_model(converted(tmp_path / "a.gguf", folder, hf))
    assert rounded(decoder_of(found)) == rounded(decoder_config(hf))
    assert found.tensors.keys() == expected.tensors.keys()
    for tensor, info in found.tensors.items():
        values = np.asarray(expected.read(tensor)).astype(np.float32)
        if tensor == "model.per_layer.embed_tokens.weight":  # the converter has a row for every token
            values = np.pad(values, ((0, info.shape[0] - len(values)), (0, 0)))
        assert info.shape == values.shape
        np.testing.assert_allclose(found.read(tensor), values, atol=3e-7, rtol=0, err_msg=tensor)


def test_mistral_small_3_has_the_name_of_ministral_3(tmp_path: Path) -> None:
    """Its files have no yarn, and no factor on queries."""
    folder, hf = in_a_file("ministral3_tiny")
    plain = {"attention__temperature_scale": None} | {
        f"rope__scaling__{key}": None for key in ("type", "factor", "original_context_length", "yarn_log_multiplier")
    }
    found = open_model(converted(tmp_path / "a.gguf", folder, hf, **plain))
    expected = {**hf, "architectures": ["MistralForCausalLM"], "rope_parameters": None}
    assert decoder_of(found) == decoder_config(expected)


@pytest.mark.parametrize(("multiplier", "attention_factor"), [(1.0, 1.0), (0.0, None), (None, None)])
def test_yarn_of_devstral_2_has_a_factor_without_a_multiplier(
    tmp_path: Path, multiplier: float | None, attention_factor: float | None
) -> None:
    """Files have the name of Ministral 3 and yarn, and a factor on queries of 0 or none."""
    folder, hf = in_a_file("ministral3_tiny")
    own: dict[str, Any] = {"attention__temperature_scale": 0.0, "rope__scaling__yarn_log_multiplier": multiplier}
    found = open_model(converted(tmp_path / "a.gguf", folder, hf, **own))
    rope = {key: value for key, value in hf["rope_parameters"].items() if not key.startswith(("mscale", "llama_4"))}
    expected = {
        **hf,
        "architectures": ["MistralForCausalLM"],
        "rope_parameters": {**rope, "attention_factor": attention_factor},
    }
    assert decoder_of(found) == decoder_config(expected)


def test_yarn_beside_a_factor_on_queries_may_have_no_multiplier(tmp_path: Path) -> None:
    folder, hf = in_a_file("ministral3_tiny")
    found = open_model(converted(tmp_path / "a.gguf", folder, hf, rope__scaling__yarn_log_multiplier=0.0))
    rope = {**hf["rope_parameters"], "mscale_all_dim": 0.0}
    assert decoder_of(found) == decoder_config({**hf, "rope_parameters": rope})


def test_a_factor_on_queries_of_0_is_none() -> None:
    _, hf = in_a_file("ministral3_tiny")
    given = decoder_config({**hf, "rope_parameters": {**hf["rope_parameters"], "llama_4_scaling_beta": 0}})
    assert given == replace(decoder_config(hf), query_scaling=None)


def test_chatglm_may_have_queries_keys_and_values_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, hf = in_a_file("glm_tiny")
    expected = open_model(converted(tmp_path / "a.gguf", folder, hf))
    names = {f"self_attn.query_key_value.{kind}": f"attn_qkv.{kind}" for kind in ("weight", "bias")}
    joined = replace(CONVERSIONS["GlmForCausalLM"], prepare=with_joined_qkv, stored_names=names)
    monkeypatch.setitem(CONVERSIONS, "GlmForCausalLM", joined)
    found = open_model(converted(tmp_path / "b.gguf", folder, hf))
    assert decoder_of(found) == decoder_of(expected)
    assert found.tensors.keys() == expected.tensors.keys()
    for tensor in found.tensors:
        np.testing.assert_array_equal(found.read(tensor), expected.read(tensor), err_msg=tensor)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"attention__head_count": [4, 4, 0, 4, 4]},
            "expected divisors of 4 beside 4 query heads, or 0 beside 0, found 0",
        ),
        ({"attention__head_count_kv": [2, 0, 0, 3, 4]}, "expected divisors of 4 beside 4 query heads"),
        ({"feed_forward_length": [0] * 5}, "'deci.feed_forward_length': expected more than 0 in a layer"),
        ({"feed_forward_length": [256, -1, 0, 0, 40]}, "expected a number from 0 on for each of the 5 layers"),
    ],
)
def test_blocks_of_llama_nemotron_that_are_not_computed_are_refused(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    """A layer with query heads alone has a matrix in the place of attention."""
    folder, hf = in_a_file("nemotron_nas_tiny")
    with pytest.raises(CheckpointError, match=message):
        open_model(converted(tmp_path / "a.gguf", folder, hf, **keys))


def test_divisors_of_gemma_3n_are_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, hf = in_a_file("gemma3n_tiny")
    divisors = np.linspace(1.0, 9.0, hf["head_dim"] // 2, dtype=np.float32)
    name = hf["architectures"][0]
    monkeypatch.setitem(CONVERSIONS, name, replace(CONVERSIONS[name], factors=lambda hf: divisors))
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight': "):
        open_model(converted(tmp_path / "a.gguf", folder, hf))


def test_divisors_of_gemma_4_are_those_of_proportional_rope(tmp_path: Path) -> None:
    folder, hf = in_a_file("gemma4_tiny")
    path = converted(tmp_path / "a.gguf", folder, hf)
    stored = np.array([1.0] * 6 + [1e30] * 18, np.float32).tobytes()
    for values in ([2.0] * 24, [1e30] * 24, [1.0] * 6 + [8.0] * 18):
        damaged = tmp_path / "b.gguf"
        assert path.read_bytes().count(stored) == 1
        damaged.write_bytes(path.read_bytes().replace(stored, np.array(values, np.float32).tobytes()))
        with pytest.raises(
            CheckpointError, match=r"'rope_freqs\.weight': expected 24 divisors, the first of them 1 and"
        ):
            open_model(damaged)


def test_exaone_4_without_a_window_rotates_all_layers(tmp_path: Path) -> None:
    folder, hf = in_a_file("exaone4_tiny")
    found = open_model(converted(tmp_path / "a.gguf", folder, hf, attention__sliding_window=None))
    assert decoder_of(found) == decoder_config(hf | {"sliding_window": None})


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "ministral3_tiny",
            {"rope__scaling__type": "linear"},
            "key 'mistral3.rope.scaling.type': expected yarn beside 'attention.temperature_scale', found 'linear'",
        ),
        (
            "ministral3_tiny",
            {"attention__temperature_length": 32},
            "key 'mistral3.attention.temperature_length': expected the original context length 16 or none, found 32",
        ),
        (
            "ministral3_tiny",
            {"rope__scaling__yarn_log_multiplier": None},
            "key 'mistral3.rope.scaling.yarn_log_multiplier': expected 0 or 1, found none",
        ),
        (
            "ministral3_tiny",
            {"rope__scaling__yarn_log_multiplier": 0.5},
            "key 'mistral3.rope.scaling.yarn_log_multiplier': expected 1 or none, found 0.5",
        ),
        ("ministral3_tiny", {"expert_count": 4}, "key 'mistral3.expert_count': expected a dense model"),
        (
            "gemma4_tiny",
            {"attention__value_length_swa": 16},
            "key 'gemma4.attention.value_length_swa': expected the head size 32 of layers with a window, found 16",
        ),
        (
            "gemma4_tiny",
            {"rope__dimension_count_swa": 8},
            "key 'gemma4.rope.dimension_count_swa': expected the head size 32 of layers with a window, found 8",
        ),
        (
            "gemma4_tiny",
            {"feed_forward_length": [56, 56, 56, 112, 112, 112]},
            "key 'gemma4.feed_forward_length': expected one width, or twice as much in the last 2 layers, found [56, ",
        ),
        (
            "gemma4_tiny",
            {"feed_forward_length": [56, 112]},
            "key 'gemma4.feed_forward_length': expected a number from 1 on for each of the 6 layers, found [56, 112]",
        ),
        (
            "gemma4_tiny",
            {"attention__head_count_kv": [2, 1, 2, 1, 2, 1]},
            "key 'gemma4.attention.head_count_kv': expected one number for the layers of each kind, the same for both",
        ),
        (
            "gemma4_tiny",
            {"rope__dimension_count": 44},
            "key 'gemma4.rope.dimension_count': expected the head size 48, found 44",
        ),
        (
            "gemma4_tiny",
            {"rope__scaling__type": "yarn"},
            "key 'gemma4.rope.scaling.type': expected none beside",
        ),
        (
            "gemma4_moe_odd_tiny",
            {"expert_feed_forward_length": None},
            "key 'gemma4.expert_feed_forward_length': expected",
        ),
        ("glm4_tiny", {"rope__dimension_sections": [4, 2, 2, 0]}, "key 'glm4.rope.dimension_sections': expected none"),
        (
            "qwen2_tiny",
            {"rope__dimension_sections": 4},
            "key 'qwen2vl.rope.dimension_sections': expected three numbers",
        ),
        ("exaone4_tiny", {"rope__freq_base_swa": 5.0}, "key 'exaone4.rope.freq_base_swa': expected the base of all"),
        ("cohere2_tiny", {"rope__freq_base_swa": 5.0}, "key 'cohere2.rope.freq_base_swa': expected the base of all"),
        ("cohere2_tiny", {"rope__dimension_count": 4}, "key 'cohere2.rope.dimension_count': expected the head size 12"),
        ("cohere_tiny", {"logit_scale": None}, "key 'command-r.logit_scale': expected a positive number, found none"),
        (
            "cohere_tiny",
            {"attention__layer_norm_epsilon": None},
            "key 'command-r.attention.layer_norm_epsilon': expected a positive number, found none",
        ),
        (
            "gemma3n_tiny",
            {"attention__shared_kv_layers": None},
            "key 'gemma3n.attention.shared_kv_layers': expected a whole number from 0 to 5, found none",
        ),
        (
            "gemma3n_tiny",
            {"feed_forward_length": [56, 56, 56, 56, 56, 48]},
            "key 'gemma3n.feed_forward_length': expected one width",
        ),
        (
            "gemma3n_tiny",
            {"activation_sparsity_scale": [1.0]},
            "key 'gemma3n.activation_sparsity_scale': expected a number for each of the 6 layers, found [1.0]",
        ),
        ("gemma3n_tiny", {"altup__num_inputs": 1}, "key 'gemma3n.altup.num_inputs': expected a whole number from 2 to"),
        (
            "apertus_tiny",
            {"xielu__alpha_n": [0.5]},
            "key 'apertus.xielu.alpha_n': expected a number for each of the 2 layers, found [0.5]",
        ),
        ("apertus_tiny", {"xielu__eps": None}, "key 'apertus.xielu.eps': expected a number for each of the 2 layers"),
        (
            "ernie4_5_moe_tiny",
            {"expert_weights_scale": 2.0},
            "key 'ernie4_5-moe.expert_weights_scale': expected 1 or none, found 2.0",
        ),
        (
            "ernie4_5_moe_tiny",
            {"expert_weights_norm": False},
            "key 'ernie4_5-moe.expert_weights_norm': expected true or none, found False",
        ),
        (
            "minimax_m2_tiny",
            {"expert_gating_func": 1},
            "key 'minimax-m2.expert_gating_func': expected 2 (sigmoid) or none, found 1",
        ),
        (
            "hunyuan_moe_tiny",
            {"expert_feed_forward_length": 8},
            "key 'hunyuan-moe.expert_feed_forward_length': expected the width 16 of all blocks, found 8",
        ),
        (
            "hunyuan_moe_tiny",
            {"expert_shared_count": 2},
            "key 'hunyuan-moe.expert_shared_count': expected 1 or none, found 2",
        ),
        (
            "afmoe_tiny",
            {"expert_gating_func": 1},
            "key 'afmoe.expert_gating_func': expected 2 (sigmoid) or none, found 1",
        ),
        ("afmoe_tiny", {"attention__sliding_window": None}, "key 'afmoe.attention.sliding_window': expected a whole"),
        ("afmoe_tiny", {"rope__freq_base_swa": 5.0}, "key 'afmoe.rope.freq_base_swa': expected the base of all layers"),
        ("exaone_moe_tiny", {"expert_gating_func": 1}, "key 'exaone-moe.expert_gating_func': expected 2 (sigmoid)"),
        ("phimoe_tiny", {"expert_gating_func": 2}, "key 'phimoe.expert_gating_func': expected 1 (softmax)"),
        ("dbrx_tiny", {"expert_weights_scale": 2.0}, "key 'dbrx.expert_weights_scale': expected 1 or none, found 2.0"),
        ("jais2_tiny", {"attention__sliding_window": 8}, "key 'jais2.attention.sliding_window': expected none"),
        (
            "jamba_tiny",
            {"attention__head_count_kv": [2, 2, 0, 2]},
            "key 'jamba.attention.head_count_kv': expected layers at the same distance from each other, found [0, 1, 3]",
        ),
        (
            "mamba_tiny",
            {"ssm__inner_size": 50},
            "key 'mamba.ssm.inner_size': expected a multiple of embedding_length 48",
        ),
        (
            "gpt_bigcode_tiny",
            {"attention__head_count_kv": 2},
            "key 'starcoder.attention.head_count_kv': expected 1 or the 4 of queries, found 2",
        ),
        (
            "mimo_v2_flash_tiny",
            {"attention__head_count_kv": [1, 1, 2, 2, 2, 2]},
            "key 'mimo2.attention.head_count_kv': expected one number for layers with full attention, and twice",
        ),
        (
            "laguna_tiny",
            {"rope__dimension_count_swa": 32},
            "key 'laguna.rope.dimension_count_swa': expected a whole number from 2 to 16, found 32",
        ),
        (
            "hy_v3_tiny",
            {"expert_shared_feed_forward_length": 24},
            "key 'hy_v3.expert_shared_feed_forward_length': expected a multiple of the width 16 of an expert, found 24",
        ),
        ("hy_v3_tiny", {"expert_weights_norm": False}, "key 'hy_v3.expert_weights_norm': expected true, found False"),
        (
            "granite_swa_tiny",
            {"attention__rope_pattern": [True]},
            "key 'granite_swa.attention.rope_pattern': expected true or false for each of the 4 layers, found [True]",
        ),
        (
            "cohere2_moe_tiny",
            {"attention__sliding_window_pattern": 2},
            "key 'cohere2moe.attention.sliding_window_pattern': expected true or false for each layer, found 2",
        ),
        (
            "mellum_tiny",
            {"expert_weights_scale": 2.0},
            "key 'mellum.expert_weights_scale': expected 1 or none, found 2.0",
        ),
        (
            "step3p5_tiny",
            {"attention__head_count": [4, 6, 4, 4]},
            "key 'step35.attention.head_count': expected one number for all layers with sliding_attention, found [4, 6, 4]",
        ),
        (
            "step3p5_tiny",
            {"attention__head_count_kv": [2, 1, 2, 2]},
            "key 'step35.attention.head_count_kv': expected one number for all layers, found [2, 1, 2]",
        ),
        (
            "step3p5_tiny",
            {"swiglu_clamp_exp": [0.5]},
            "key 'step35.swiglu_clamp_exp': expected a number for each of the 3",
        ),
        (
            "glm_moe_dsa_tiny",
            {"attention__indexer__top_k": None},
            "key 'glm-dsa.attention.indexer.top_k': expected a whole number from 1",
        ),
        (
            "mistral4_tiny",
            {"attention__temperature_length": 32},
            "key 'mistral4.attention.temperature_length': expected the original context length 16 or none, found 32",
        ),
        (
            "hunyuan_tiny",
            {"attention__sliding_window": 8},
            "key 'hunyuan-dense.attention.sliding_window': expected none",
        ),
    ],
)
def test_keys_that_are_not_computed_are_rejected(
    tmp_path: Path, name: str, changes: dict[str, Any], expected: str
) -> None:
    folder, hf = in_a_file(name)
    with pytest.raises(CheckpointError) as caught:
        open_model(converted(tmp_path / "a.gguf", folder, hf, **changes))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
