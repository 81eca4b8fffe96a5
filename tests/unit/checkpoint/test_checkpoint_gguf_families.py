"""A tiny checkpoint of each newer family in llama.cpp's format is read like its safetensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.huggingface import open_tensors
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.executor.adapters import open_adapters
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.registry import decoder_config, decoder_of, families, open_model
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import (
    HIDDEN,
    decoder_metadata,
    decoder_weights,
    stored,
    write_decoder,
    write_gguf,
    write_safetensors,
)
from tests.unit.checkpoint.gguf_families import as_stored, llama4_in_a_file, write_as_gguf

DEEPSEEK: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 8,
    "expert_shared_count": 1,
    "attention__kv_lora_rank": 8,
    "attention__key_length_mla": 12,
    "attention__value_length_mla": 8,
    "rope__dimension_count": 4,
}


MIXERS: dict[str, Any] = {
    "attention__head_count_kv": [0, 2],
    "ssm__time_step_rank": 4,
    "ssm__inner_size": 2 * HIDDEN,
    "ssm__group_count": 1,
    "ssm__state_size": 8,
    "ssm__conv_kernel": 4,
}
PARALLEL_MIXERS = {key: value for key, value in MIXERS.items() if key != "attention__head_count_kv"}
CONVOLUTIONS: dict[str, Any] = {"attention__head_count_kv": [0, 2], "shortconv__l_cache": 3}
CONVOLUTION_EXPERTS = CONVOLUTIONS | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
DELTA_NETS: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 8,
    "expert_shared_feed_forward_length": 8,
    "ssm__conv_kernel": 4,
    "ssm__state_size": 8,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 4,
    "ssm__inner_size": 16,
}
LLAMA4: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 1,
    "expert_feed_forward_length": 8,
    "interleave_moe_layer_step": 2,
}


@pytest.mark.parametrize(
    "name",
    [
        "gemma_tiny",
        "arcee_tiny",
        "dots1_tiny",
        "gemma2_tiny",
        "gemma3_tiny",
        "phi3_tiny",
        "phi3_longrope_tiny",
        "phi4_mini_tiny",
        "olmo_tiny",
        "olmo2_tiny",
        "olmo3_tiny",
        "granite_tiny",
        "granitemoe_tiny",
        "granitemoeshared_odd_tiny",
        "deepseek_v2_tiny",
        "deepseek_v3_tiny",
        "glm4_moe_tiny",
        "llama4_tiny",
        "llama4_odd_tiny",
        "granitemoehybrid_tiny",
        "granitemoehybrid_dense_tiny",
        "lfm2_tiny",
        "lfm2_odd_tiny",
        "lfm2_moe_tiny",
        "qwen3_moe_tiny",
        "qwen2_moe_tiny",
        "mixtral_tiny",
        "qwen3_next_tiny",
        "qwen3_next_odd_tiny",
        "qwen3_5_tiny",
        "qwen3_5_odd_tiny",
        "qwen3_5_moe_tiny",
        "olmoe_tiny",
        "gpt_oss_tiny",
    ],
)
def test_newer_families_are_read_as_their_safetensors(tmp_path: Path, name: str) -> None:
    folder = golden_checkpoint(name).path
    hf = json.loads((folder / "config.json").read_text())
    if "query_pre_attn_scalar" in hf:
        hf["query_pre_attn_scalar"] = hf["head_dim"]  # what no key carries, but of the 27B models
    if "Lfm2MoeForCausalLM" in hf["architectures"]:
        hf["routed_scaling_factor"] = 1.0  # what no key carries
    if "swiglu_limit" in hf:
        hf["swiglu_limit"] = 7.0  # what no key carries
    if "Llama4ForCausalLM" in hf["architectures"]:
        hf = llama4_in_a_file(hf)
    if "mscale" in (hf.get("rope_scaling") or {}):
        hf["rope_scaling"]["mscale"] = hf["rope_scaling"]["mscale_all_dim"]  # what no key carries
    checkpoint = open_model(folder)
    found = open_model(write_as_gguf(tmp_path / "a.gguf", checkpoint, hf))
    assert rounded(decoder_of(found)) == rounded(decoder_config(hf))
    assert found.tensors.keys() == checkpoint.tensors.keys()
    for tensor in checkpoint.tensors:
        expected = checkpoint.read(tensor).astype(np.float32)
        np.testing.assert_allclose(found.read(tensor).astype(np.float32), expected, atol=3e-7, rtol=0, err_msg=tensor)


@pytest.mark.parametrize("name", ["glm4_moe_tiny", "qwen3_5_tiny"])
def test_multi_token_prediction_layers_of_a_file_are_left_out(tmp_path: Path, name: str) -> None:
    folder = golden_checkpoint(name).path
    hf, checkpoint = json.loads((folder / "config.json").read_text()), open_model(folder)
    found = open_model(write_as_gguf(tmp_path / "a.gguf", checkpoint, hf, num_mtp_layers=2))
    assert decoder_of(found) == decoder_config(hf)
    assert found.tensors.keys() == checkpoint.tensors.keys()


def test_deepseek_files_from_before_absorption_are_read_as_the_others(tmp_path: Path) -> None:
    """Their matrices of keys and values are one, and a router's bias tells of sigmoid scores."""
    folder = golden_checkpoint("deepseek_v3_tiny").path
    hf, checkpoint = json.loads((folder / "config.json").read_text()), open_model(folder)
    found = open_model(write_as_gguf(tmp_path / "a.gguf", checkpoint, hf, is_absorbed=False))
    assert decoder_of(found) == decoder_config(hf | {"n_group": 1, "topk_group": 1})
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    np.testing.assert_array_equal(found.read(name), checkpoint.read(name).astype(np.float32))


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "groups"), [(60, 160, (8, 3)), (61, 256, (8, 4)), (27, 64, (1, 1))]
)
def test_groups_of_published_deepseeks_need_no_key(
    tmp_path: Path, num_layers: int, num_experts: int, groups: tuple[int, int]
) -> None:
    options = DEEPSEEK | {"block_count": num_layers, "expert_count": num_experts}
    experts = decoder_of(open_model(write_decoder(tmp_path / "a.gguf", "deepseek2", **options))).experts
    assert experts is not None
    assert (experts.num_groups, experts.num_groups_per_token, experts.score) == (*groups, "softmax")


def test_glm_4_7_flash_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    folder = golden_checkpoint("glm4_moe_lite_tiny").path
    hf = json.loads((folder / "config.json").read_text()) | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    found = open_model(write_as_gguf(tmp_path / "a.gguf", open_model(folder), hf))
    assert decoder_of(found) == decoder_config(hf)
    assert found.config["architectures"] == ["DeepseekV3ForCausalLM"]


def test_latent_matrices_in_blocks_are_joined_as_floats(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    keys, values = (random.standard_normal((2, 32, 64), dtype=np.float32) for _ in range(2))
    keys, values = keys.reshape(2, 64, 32), values.reshape(2, 32, 64)
    options = DEEPSEEK | {
        "attention__kv_lora_rank": 64,
        "attention__key_length_mla": 36,
        "attention__value_length_mla": 32,
    }
    metadata = decoder_metadata("deepseek2", **options)
    embedding = {"token_embd.weight": ("F32", decoder_weights()["token_embd.weight"])}
    parts = {"blk.1.attn_k_b.weight": stored("Q8_0", keys), "blk.1.attn_v_b.weight": stored("Q4_1", values)}
    found = open_model(write_gguf(tmp_path / "a.gguf", "deepseek2", metadata, embedding | parts))
    whole = found.read("model.layers.1.self_attn.kv_b_proj.weight")
    assert isinstance(whole, np.ndarray)
    assert whole.dtype == np.float32
    by_kind = [("Q8_0", keys.swapaxes(1, 2), slice(32)), ("Q4_1", values, slice(32, None))]
    for kind, expected, rows in by_kind:
        dequantised = whole.reshape(2, 64, 64)[:, rows]
        assert 0 < np.abs(dequantised - expected).max() < {"Q8_0": 0.02, "Q4_1": 0.3}[kind]
    del parts["blk.1.attn_k_b.weight"]
    path = write_gguf(tmp_path / "b.gguf", "deepseek2", metadata, embedding | parts)
    with pytest.raises(CheckpointError, match=r"expected tensors attn_k_b and attn_v_b of .*found shapes"):
        open_model(path)


def test_inputs_of_delta_nets_are_read_as_one_matrix_or_as_two(tmp_path: Path) -> None:
    """The first converters of Qwen3-Next left the matrix as it is."""
    folder = golden_checkpoint("qwen3_next_tiny").path
    hf, checkpoint = json.loads((folder / "config.json").read_text()), open_model(folder)
    name = "model.layers.2.linear_attn.in_proj_qkvz.weight"
    for has_split_gates in (False, True):
        path = write_as_gguf(tmp_path / "a.gguf", checkpoint, hf, has_split_gates=has_split_gates)
        assert ("blk.2.ssm_in.weight" in open_gguf(path).tensors) != has_split_gates
        found = open_model(path)
        assert found.tensors.keys() == checkpoint.tensors.keys()
        np.testing.assert_array_equal(found.read(name), checkpoint.read(name).astype(np.float32))


def test_inputs_of_delta_nets_in_blocks_are_joined_as_floats(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    query, key, value, gate = random.standard_normal((4, 2, 8, HIDDEN), dtype=np.float32)
    inputs, gates = np.concatenate([query, key, value]).reshape(-1, HIDDEN), gate.reshape(-1, HIDDEN)
    metadata = decoder_metadata("qwen3next", **DELTA_NETS)
    embedding = {"token_embd.weight": ("F32", decoder_weights()["token_embd.weight"])}
    parts = {"blk.1.attn_qkv.weight": stored("Q8_0", inputs), "blk.1.attn_gate.weight": stored("Q4_1", gates)}
    found = open_model(write_gguf(tmp_path / "a.gguf", "qwen3next", metadata, embedding | parts))
    whole = found.read("model.layers.1.linear_attn.in_proj_qkvz.weight")
    assert isinstance(whole, np.ndarray)
    assert whole.dtype == np.float32
    error = np.abs(whole.reshape(2, 32, HIDDEN) - np.concatenate([query, key, value, gate], 1))
    assert 0 < error[:, :24].max() < 0.02 < error[:, 24:].max() < 0.3
    narrow = {"blk.1.attn_gate.weight": ("F32", gates[:8])}
    for changed in (parts | narrow, narrow, {"blk.1.attn_qkv.weight": parts["blk.1.attn_qkv.weight"]}):
        path = write_gguf(tmp_path / "b.gguf", "qwen3next", metadata, embedding | changed)
        with pytest.raises(CheckpointError, match=r"linear_attn': expected tensors attn_qkv and attn_gate of shapes"):
            open_model(path)


@pytest.mark.parametrize(("width", "has_whole_blocks"), [(32, True), (16, False)])
def test_value_heads_are_read_in_the_order_of_their_key_heads(
    tmp_path: Path, width: int, has_whole_blocks: bool
) -> None:
    """Rows move with their blocks, and so do columns if a head is whole blocks wide."""
    num_values, hf = 6, {"architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 2}
    hf |= {"linear_num_value_heads": num_values, "linear_value_head_dim": width}
    num_rows, random = 32 + num_values * width, np.random.default_rng(5)
    sizes = DELTA_NETS | {"ssm__time_step_rank": num_values, "ssm__inner_size": num_values * width}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "in_proj_qkv.weight": ("attn_qkv.weight", (num_rows, HIDDEN)),
        "in_proj_z.weight": ("attn_gate.weight", (num_values * width, HIDDEN)),
        "in_proj_a.weight": ("ssm_alpha.weight", (num_values, HIDDEN)),
        "in_proj_b.weight": ("ssm_beta.weight", (num_values, HIDDEN)),
        "out_proj.weight": ("ssm_out.weight", (HIDDEN, num_values * width)),
        "conv1d.weight": ("ssm_conv1d.weight", (num_rows, 1, 4)),
        "A_log": ("ssm_a", (num_values,)),
        "dt_bias": ("ssm_dt.bias", (num_values,)),
        "norm.weight": ("ssm_norm.weight", (width,)),
    }
    module, tensors, expected = "model.layers.0.linear_attn.", {}, {}
    for part, (stored_name, shape) in shapes.items():
        expected[part] = values = random.standard_normal(shape, dtype=np.float32)
        kind = "Q8_0" if "proj" in part else "F32"
        tensors[f"blk.0.{stored_name}"] = stored(kind, as_stored(module + part, values, hf))
    metadata = decoder_metadata("qwen35", **{key: value for key, value in sizes.items() if "expert" not in key})
    embedding = {"token_embd.weight": ("F32", decoder_weights()["token_embd.weight"])}
    found = open_model(write_gguf(tmp_path / "a.gguf", "qwen35", metadata, embedding | tensors))
    for part, values in expected.items():
        tensor, info = found.read(module + part), found.tensors[module + part]
        assert info.shape == values.shape
        assert info.is_quantized == ("proj" in part and (part != "out_proj.weight" or has_whole_blocks))
        if info.is_quantized:
            np.testing.assert_array_equal(tensor.blocks, stored("Q8_0", values)[1])  # type: ignore[union-attr]
        else:
            np.testing.assert_allclose(tensor, values, atol=0.02 if "proj" in part else 1e-6, rtol=0, err_msg=part)


@pytest.mark.parametrize(("num_experts", "qk_norm"), [(16, "rotated_unit"), (128, "none")])
def test_llama_4_with_128_experts_has_no_norms_of_queries_and_keys(
    tmp_path: Path, num_experts: int, qk_norm: str
) -> None:
    options = LLAMA4 | {"expert_count": num_experts}
    decoder = decoder_of(open_model(write_decoder(tmp_path / "a.gguf", "llama4", **options)))
    assert decoder.qk_norm == qk_norm
    assert [layer.experts is not None for layer in decoder.layers] == [False, True]


def test_mixers_whose_numbers_do_not_fit_are_rejected(tmp_path: Path) -> None:
    for change, expected in (({"ssm__inner_size": 12}, "embedding_length 32"), ({"ssm__time_step_rank": 3}, "3 heads")):
        path = write_decoder(tmp_path / "a.gguf", "granitehybrid", **(MIXERS | change))
        with pytest.raises(
            CheckpointError, match=rf"granitehybrid\.ssm\.inner_size': expected a multiple of {expected}"
        ):
            open_model(path)
    for counts in ([0, 0], [2, 1], [2], [0, -1]):
        options = MIXERS | {"attention__head_count_kv": counts}
        path = write_decoder(tmp_path / "a.gguf", "granitehybrid", **options)
        with pytest.raises(CheckpointError, match=r"attention\.head_count_kv': expected"):
            open_model(path)
    growing = {"blk.0.ssm_a": np.array([[-1.0], [-2.0], [0.5], [-1.0]], np.float32)}
    found = open_model(write_decoder(tmp_path / "a.gguf", "granitehybrid", growing, **MIXERS))
    with pytest.raises(CheckpointError, match=r"A_log'?: expected negative numbers"):
        found.read("model.layers.0.mamba.A_log")


def test_the_final_norm_of_lfm2_has_one_of_two_names(tmp_path: Path) -> None:
    """llama.cpp names it for the embeddings, Ollama as other families."""
    norm = np.full(HIDDEN, 2.0, np.float32)
    own, common = {"token_embd_norm.weight": norm, "output_norm.weight": None}, {"output_norm.weight": norm}
    for tensors in (own, common):
        found = open_model(write_decoder(tmp_path / "a.gguf", "lfm2", tensors, **CONVOLUTIONS))
        np.testing.assert_array_equal(found.read("model.norm.weight"), norm)
    for architecture, tensors, options in (("lfm2", own | common, CONVOLUTIONS), ("llama", own, {})):
        path = write_decoder(tmp_path / "b.gguf", architecture, tensors, **options)
        with pytest.raises(CheckpointError, match=r"token_embd_norm\.weight'.*no place in it"):
            open_model(path)


def test_feed_forward_norms_of_falcon_h1_have_no_suffix(tmp_path: Path) -> None:
    norm, name = np.full(HIDDEN, 2.0, np.float32), "model.layers.0.post_attention_layernorm.weight"
    bare = {"blk.0.ffn_norm": norm, "blk.0.ffn_norm.weight": None}
    found = open_model(write_decoder(tmp_path / "a.gguf", "falcon-h1", bare, **PARALLEL_MIXERS))
    np.testing.assert_array_equal(found.read(name), norm)
    twice = {"blk.0.ffn_norm": norm}
    for architecture, tensors in (
        ("falcon-h1", twice),
        ("granitehybrid", bare),
        ("falcon-h1", {"blk.0.attn_norm": norm}),
    ):
        options = PARALLEL_MIXERS if architecture == "falcon-h1" else MIXERS
        path = write_decoder(tmp_path / "b.gguf", architecture, tensors, **options)
        with pytest.raises(CheckpointError, match="no place in it"):
            open_model(path)


def test_weights_without_the_factors_of_a_file_are_rejected(tmp_path: Path) -> None:
    """Files of Falcon-H1 have weights multiplied with factors that no key carries; adapters and single tensors lack them."""
    served = open_model(write_decoder(tmp_path / "a.gguf", "falcon-h1", **PARALLEL_MIXERS))
    other = open_model(write_decoder(tmp_path / "b.gguf", "granitehybrid", **MIXERS))
    file = write_safetensors(tmp_path / "c.safetensors", {"lm_head.weight": np.ones((4, HIDDEN), np.float32)})
    reserved = Config(model=ModelConfig(model="any", max_loras=1))
    for read in (
        lambda model: open_tensors(file, model, families()),
        lambda model: open_adapters(reserved, decoder_of(model), model.config),
    ):
        read(other)
        with pytest.raises(CheckpointError, match="whose weights are multiplied with factors that these lack"):
            read(served)
    assert not open_adapters(Config(model=ModelConfig(model="any")), decoder_of(served), served.config)


def test_attention_biases_of_falcon_h1_are_rejected(tmp_path: Path) -> None:
    biases = {"blk.0.attn_q.bias": np.ones(32, np.float32)}
    found = open_model(write_decoder(tmp_path / "a.gguf", "falcon-h1", biases, **PARALLEL_MIXERS))
    with pytest.raises(CheckpointError, match="attention_bias"):
        decoder_of(found)


@pytest.mark.parametrize("name", ["blk.0.attn_q", "blk.0.ssm_a.weight", "blk.0.ssm_dt"])
def test_names_with_another_suffix_are_rejected(tmp_path: Path, name: str) -> None:
    extra = {name: np.ones((4, HIDDEN), np.float32)}
    with pytest.raises(CheckpointError, match="no place in it"):
        open_model(write_decoder(tmp_path / "a.gguf", "granitehybrid", extra, **MIXERS))


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
        ("llama4", {}, "key 'llama4.expert_count': expected a whole number"),
        (
            "llama4",
            LLAMA4 | {"attention__sliding_window": 0},
            "key 'llama4.attention.sliding_window': expected 8192 or none, found 0",
        ),
        (
            "llama4",
            LLAMA4 | {"rope__freq_base_swa": 5.0},
            "key 'llama4.rope.freq_base_swa': expected the base of all layers",
        ),
        (
            "llama4",
            LLAMA4 | {"attention__temperature_scale": 0.2},
            "key 'llama4.attention.temperature_scale': expected 0.1 or none",
        ),
        (
            "deepseek2",
            DEEPSEEK | {"attention__temperature_scale": 0.1},
            "key 'deepseek2.attention.temperature_scale': expected none",
        ),
        (
            "deepseek2",
            DEEPSEEK | {"expert_gating_func": 4},
            "key 'deepseek2.expert_gating_func': expected 1 or 2, or none",
        ),
        ("deepseek2", DEEPSEEK | {"expert_weights_norm": True}, "key 'deepseek2.expert_weights_norm': expected false"),
        ("deepseek2", DEEPSEEK | {"attention__key_length_mla": 4}, "expected a whole number from 5 to"),
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
        (
            "lfm2",
            CONVOLUTIONS | {"attention__sliding_window": 8},
            "key 'lfm2.attention.sliding_window': expected none for this architecture, found 8",
        ),
        (
            "lfm2",
            CONVOLUTIONS | {"attention__causal": False},
            "key 'lfm2.attention.causal': expected true or none: tokens attend to earlier ones only, found False",
        ),
        (
            "lfm2",
            CONVOLUTIONS | {"shortconv__l_cache": 1},
            "key 'lfm2.shortconv.l_cache': expected a whole number from 2 to",
        ),
        (
            "lfm2",
            CONVOLUTIONS | {"attention__head_count_kv": [0, 0]},
            "key 'lfm2.attention.head_count_kv': expected 0 or the same number for each of the 2 layers",
        ),
        (
            "lfm2moe",
            CONVOLUTION_EXPERTS | {"expert_gating_func": 1},
            "key 'lfm2moe.expert_gating_func': expected 2 (sigmoid) or none, found 1",
        ),
        (
            "lfm2moe",
            CONVOLUTION_EXPERTS | {"expert_weights_scale": 1.5},
            "key 'lfm2moe.expert_weights_scale': expected 1 or none, found 1.5",
        ),
        (
            "lfm2moe",
            CONVOLUTION_EXPERTS | {"expert_weights_norm": False},
            "key 'lfm2moe.expert_weights_norm': expected true or none, found False",
        ),
        ("lfm2moe", CONVOLUTIONS, "key 'lfm2moe.expert_count': expected a whole number from 1"),
        (
            "qwen3next",
            DELTA_NETS | {"ssm__inner_size": 18},
            "key 'qwen3next.ssm.inner_size': expected a multiple of 4 heads, found 18",
        ),
        (
            "qwen3next",
            DELTA_NETS | {"ssm__time_step_rank": 3},
            "key 'qwen3next.ssm.time_step_rank': expected a multiple of 2 key heads, found 3",
        ),
        (
            "qwen3next",
            DELTA_NETS | {"expert_shared_feed_forward_length": None},
            "key 'qwen3next.expert_shared_feed_forward_length': expected a whole number from 1",
        ),
        (
            "qwen35moe",
            DELTA_NETS | {"expert_feed_forward_length": None},
            "key 'qwen35moe.expert_feed_forward_length': expected a whole number from 1",
        ),
        ("qwen35", DELTA_NETS, "key 'qwen35.expert_count': expected a dense model (0 experts), found 4"),
        (
            "falcon-h1",
            PARALLEL_MIXERS | {"ssm__inner_size": 18},
            "key 'falcon-h1.ssm.inner_size': expected a multiple of 4 heads, found 18",
        ),
        (
            "falcon-h1",
            PARALLEL_MIXERS | {"attention__head_count_kv": [2, 1]},
            "key 'falcon-h1.attention.head_count_kv': expected a whole number from 1",
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
