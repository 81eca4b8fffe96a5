"""Configs as published and as transformers reads them become the right DecoderConfig."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from jaxserve.checkpoint.files import parse_object
from jaxserve.errors import CheckpointError
from jaxserve.layers.rope import inverse_frequencies, row_order
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.experts import ExpertsConfig
from jaxserve.model_config.rope import RopeScaling
from jaxserve.models.registry import architectures, decoder_config, families
from tests.models.goldens import (
    DATA,
    REMOTE_CODE,
    config_goldens,
    golden_checkpoint,
    golden_names,
    rope_goldens,
    sentence_goldens,
)

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
PLAIN_DECODER = DecoderConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerConfig(), LayerConfig()),
    max_position=512,
    norm_eps=1e-5,
    rope_theta=10_000.0,
)
LEFT_OUT = {"nemotron_nas_tiny": 1}
"""Layers of tiny checkpoints that have neither attention nor a feed-forward block."""


def of(architecture: str, **keys: Any) -> dict[str, Any]:
    return {**PLAIN, "architectures": [f"{architecture}ForCausalLM"], **keys}


def test_llama_2_keys_are_all_read() -> None:
    hf = of("Llama", num_key_value_heads=4, rope_theta=1e5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)
    assert decoder_config(hf) == replace(
        PLAIN_DECODER, num_kv_heads=4, rope_theta=1e5, tied_embeddings=True, bos_token_id=1, eos_token_ids=(2,)
    )


@pytest.mark.parametrize("architecture", ["Llama", "SmolLM3"])
def test_a_tensor_parallel_size_of_training_changes_nothing(architecture: str) -> None:
    assert decoder_config(of(architecture, pretraining_tp=2)) == decoder_config(of(architecture))


def test_llama_without_kv_heads_has_one_for_each_query_head() -> None:
    hf = of("Llama")
    del hf["num_key_value_heads"]
    assert decoder_config(hf).num_kv_heads == 4
    assert decoder_config(of("Llama", num_key_value_heads=None)).num_kv_heads == 4


def test_llama_attention_bias_is_on_the_output_projection_too() -> None:
    config = decoder_config(of("Llama", attention_bias=True, mlp_bias=True))
    assert config == replace(PLAIN_DECODER, qkv_bias=True, attention_out_bias=True, mlp_bias=True)


def test_head_dim_may_differ_from_width_over_heads() -> None:
    assert decoder_config(of("Llama", head_dim=32)).head_dim == 32
    assert decoder_config(of("Llama", head_dim=None)).head_dim == 16


def test_mistral_window_applies_to_every_layer_and_null_is_none() -> None:
    assert decoder_config(of("Mistral")).layers == (LayerConfig(4096),) * 2
    assert decoder_config(of("Mistral", sliding_window=8)).layers == (LayerConfig(8),) * 2
    assert decoder_config(of("Mistral", sliding_window=None)) == PLAIN_DECODER


def test_phi_moe_has_one_window_for_all_layers() -> None:
    windows = {layer.sliding_window for layer in decoder_config(of("Phimoe", sliding_window=8)).layers}
    assert windows == {8}


@pytest.mark.parametrize("architecture", ["Cohere", "Cohere2"])
def test_command_r_serves_the_length_of_either_key(architecture: str) -> None:
    assert decoder_config(of(architecture, model_max_length=4096)).max_position == 4096
    assert decoder_config(of(architecture, model_max_length=64)).max_position == 512


@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3Moe"])
def test_dual_chunk_attention_serves_texts_of_one_chunk(architecture: str) -> None:
    chunks = {"chunk_size": 256, "local_size": 8, "original_max_position_embeddings": 256}
    assert decoder_config(of(architecture, dual_chunk_attention_config=chunks)).max_position == 256
    assert decoder_config(of(architecture, dual_chunk_attention_config=None)).max_position == 512


def test_qwen2_has_a_bias_on_q_k_and_v_only() -> None:
    assert decoder_config(of("Qwen2")) == replace(PLAIN_DECODER, qkv_bias=True)


def test_qwen3_norms_query_and_key_heads_of_128() -> None:
    assert decoder_config(of("Qwen3")) == replace(PLAIN_DECODER, qk_norm="heads", head_dim=128)


@pytest.mark.parametrize(("architecture", "key"), [("Cohere", "use_qk_norm"), ("StableLm", "qk_layernorm")])
def test_command_r_plus_and_stablelm_2_12b_norm_each_head_with_its_own_weights(architecture: str, key: str) -> None:
    plain = decoder_config(of(architecture))
    assert plain.qk_norm == "none"
    normed = decoder_config(of(architecture, **{key: True}))
    assert normed == replace(plain, qk_norm="each_head", qk_norm_kind="layer")


def test_command_r_may_have_null_for_no_norms_of_heads() -> None:
    assert decoder_config(of("Cohere", use_qk_norm=None)) == decoder_config(of("Cohere"))


def test_qwen_window_counts_only_when_switched_on() -> None:
    window = {"sliding_window": 8, "max_window_layers": 1}
    assert decoder_config(of("Qwen3", **window)).layers == (LayerConfig(), LayerConfig())
    assert decoder_config(of("Qwen3", use_sliding_window=True, **window)).layers == (LayerConfig(), LayerConfig(8))
    null = {"sliding_window": None, "max_window_layers": 0}
    assert decoder_config(of("Qwen2", use_sliding_window=True, **null)).layers == (LayerConfig(), LayerConfig())


def test_qwen3_moe_has_experts_in_every_nth_layer_except_dense_ones() -> None:
    keys = {"num_hidden_layers": 6, "moe_intermediate_size": 32, "num_experts": 16, "norm_topk_prob": True}
    experts = ExpertsConfig(num_experts=16, num_per_token=8, intermediate_size=32, is_normalized=True)
    assert [layer.experts for layer in decoder_config(of("Qwen3Moe", **keys)).layers] == [experts] * 6
    config = decoder_config(of("Qwen3Moe", **keys, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [layer.experts is not None for layer in config.layers] == [False, True, False, False, False, True]
    assert config.experts == experts
    assert config.qk_norm == "heads"


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_the_number_of_experts_is_read_from_either_key(architecture: str) -> None:
    for key in ("num_experts", "num_local_experts"):
        experts = decoder_config(of(architecture, **{key: 24})).experts
        assert experts is not None
        assert experts.num_experts == 24


def test_mixtral_and_olmoe_have_experts_of_the_configured_width_in_every_layer() -> None:
    mixtral, olmoe = decoder_config(of("Mixtral")), decoder_config(of("Olmoe"))
    assert mixtral.layers == (LayerConfig(experts=ExpertsConfig(8, 2, 96, is_normalized=True)),) * 2
    assert olmoe.layers == (LayerConfig(experts=ExpertsConfig(64, 8, 96, is_normalized=False)),) * 2
    assert (mixtral.qk_norm, olmoe.qk_norm) == ("none", "whole")


def test_smollm3_has_no_rope_in_every_fourth_layer_and_a_tied_head() -> None:
    config = decoder_config(of("SmolLM3", num_hidden_layers=5))
    assert [layer.use_rope for layer in config.layers] == [True, True, True, False, True]
    assert config.tied_embeddings
    assert config.rope_theta == 2_000_000.0


def test_gemma_3_sliding_window_layers_have_a_rope_base_in_both_formats() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    old = decoder_config(of("Gemma3", rope_theta=1e5, rope_local_base_freq=1e3, rope_scaling=scaled))
    tables = {
        "full_attention": {**scaled, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
    new = decoder_config(of("Gemma3", rope_parameters=tables))
    assert (new.rope_theta, new.sliding_rope_theta) == (1e5, 1e3)
    assert new.rope_scaling == RopeScaling("linear", 8.0)
    assert new == old
    with pytest.raises(CheckpointError, match=r"rope_parameters\.sliding_attention\.rope_type is 'linear'"):
        decoder_config(of("Gemma3", rope_parameters={**tables, "sliding_attention": scaled}))


def test_granite_with_windows_has_a_rope_base_for_each_kind_of_layer_or_none() -> None:
    config = decoder_config(of("GraniteSWA", num_hidden_layers=4, layer_rope_theta=[0, 1e3, 1e3, 1e3], rope_theta=1e5))
    assert [layer.sliding_window for layer in config.layers] == [None, 128, 128, 128]
    assert [layer.use_rope for layer in config.layers] == [False, True, True, True]
    assert (config.rope_theta, config.sliding_rope_theta, config.sinks) == (1e5, 1e3, "all")
    assert decoder_config(of("GraniteSWA", num_hidden_layers=4)).sliding_rope_theta is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"layer_rope_theta": [1e4, 1e4, 1e3, 1e4]}, "supported: one base for all layers with a window"),
        ({"layer_rope_theta": [1e4]}, "supported: a list with one entry for each of the 4 layers"),
        ({"layer_rope_theta": [1e4, "x", 1e4, 1e4]}, "layer_rope_theta is 'x'; supported: a finite number"),
        (
            {"layer_rope_theta": [1e4, 1e3, 1e3, 1e3], "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "supported: the same base for all layers, as rope is scaled",
        ),
    ],
)
def test_rope_bases_that_granite_does_not_compute_are_rejected(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        decoder_config(of("GraniteSWA", num_hidden_layers=4, **change))


def test_mellum_has_experts_in_every_layer_and_rope_bases_of_its_own() -> None:
    config = decoder_config(of("Mellum", num_hidden_layers=3))
    assert all(layer.experts is not None and layer.sliding_window is None for layer in config.layers)
    assert (config.rope_theta, config.sliding_rope_theta) == (500_000.0, 10_000.0)


def test_mimo_reads_the_names_of_its_published_config() -> None:
    own = {"sliding_window": 8, "sliding_window_size": 8, "swa_rope_theta": 1e3, "rope_theta": 1e5}
    published = {
        **{key: value for key, value in PLAIN.items() if key != "rms_norm_eps"},
        "architectures": ["MiMoV2FlashForCausalLM"],
        "num_hidden_layers": 7,
        "layernorm_epsilon": 0.5,
        "routed_scaling_factor": None,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        **own,
    }
    config = decoder_config(published)
    assert [layer.sliding_window for layer in config.layers] == [None, 9, 9, 9, 9, None, 9]
    assert [config.kv_shape(layer) for layer in config.layers[:2]] == [(2, 192), (4, 192)]
    assert (config.norm_eps, config.rope_theta, config.sliding_rope_theta, config.rotary_dim) == (0.5, 1e5, 1e3, 64)
    assert (config.value_dim, config.value_scale, config.sinks) == (128, 0.707, "windows")


def test_k_exaones_published_keys_give_one_dense_layer_and_full_attention_without_rotation() -> None:
    keys = {"num_experts": 8, "num_experts_per_tok": 2, "is_moe_layer": [False, *[True] * 7], "sliding_window": 8}
    keys |= {"sliding_window_pattern": "LLLG", "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2}
    layers = decoder_config(of("ExaoneMoE", num_hidden_layers=8, first_last_k_dense_replace=1, **keys)).layers
    assert [layer.experts is None for layer in layers] == [True] + [False] * 7
    assert [(layer.sliding_window, layer.use_rope) for layer in layers] == [*[(8, True)] * 3, (None, False)] * 2


def test_gemmas_window_pattern_and_caps_are_read() -> None:
    config = decoder_config(of("Gemma2", num_hidden_layers=3, sliding_window=8, query_pre_attn_scalar=144))
    assert [layer.sliding_window for layer in config.layers] == [8, None, 8]
    assert (config.attention_softcap, config.logit_softcap, config.attention_scale) == (50.0, 30.0, 1 / 12)
    assert decoder_config(of("Gemma2", attn_logit_softcapping=None)).attention_softcap is None


@pytest.mark.parametrize("name", sorted(config_goldens()["layers"]))
def test_windows_and_rope_of_layers_equal_transformers(name: str) -> None:
    case = config_goldens()["layers"][name]
    layers = decoder_config(case["config"]).layers
    assert [layer.sliding_window for layer in layers] == case["windows"]
    assert [layer.use_rope for layer in layers] == case["use_rope"]


@pytest.mark.parametrize("name", sorted(name for name, case in config_goldens()["layers"].items() if case["saved"]))
def test_layers_of_a_config_saved_by_transformers_equal_those_of_the_original(name: str) -> None:
    case = config_goldens()["layers"][name]
    saved = parse_object(json.dumps(case["saved"]).encode(), "config.json")
    assert decoder_config(saved).layers == decoder_config(case["config"]).layers


@pytest.mark.parametrize(
    ("keys", "sources"),
    [
        ({}, [None] * 8),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [None, None, None, 2, 2, 2, None, 6]),
        ({"index_topk_freq": 2}, [None, None, 1, None, 3, None, 5, None]),
        ({"index_topk_pattern": "FSSFFSSS"}, [None, 0, 0, None, None, 4, 4, 4]),
        ({"indexer_types": ["full"] + ["shared"] * 7, "index_topk_freq": 2}, [None] + [0] * 7),
    ],
    ids=str,
)
def test_layers_without_an_indexer_take_the_choice_of_the_one_before(keys: dict[str, Any], sources: list[Any]) -> None:
    """GLM-5.2 has a period of 4 after 3 layers: transformers' `GlmMoeDsaConfig` says how these are read."""
    config = decoder_config(of("GlmMoeDsa", num_hidden_layers=8, **keys))
    assert [layer.index_source for layer in config.layers] == sources
    kinds = [(group.kind, group.num_layers) for group in config.cache.groups]
    assert kinds == [("latent", 8), ("index", sources.count(None))]


def test_minimax_m1_as_published_has_lightning_attention_and_half_rotated_heads() -> None:
    """Published configs have a list of 0 and 1, and names of factors of their own."""
    kinds, factors = [0, 0, 1, 0], {"full_attention": 3.5, "linear_attention": 2.5, "mlp": 1.5}
    published = {f"layernorm_{name}_alpha": factor for name, factor in factors.items()}
    keys = {"num_hidden_layers": 4, "head_dim": 32, "postnorm": True, "rotary_dim": 16, "attn_type_list": kinds}
    config = decoder_config(of("MiniMaxM1", **keys, **published))
    names = ["full_attention" if kind else "linear_attention" for kind in kinds]
    ours = {"full_attn_alpha_factor": 3.5, "linear_attn_alpha_factor": 2.5, "mlp_alpha_factor": 1.5}
    saved = {"num_hidden_layers": 4, "head_dim": 32, "layer_types": names, "partial_rotary_factor": 0.5, **ours}
    assert config == decoder_config(of("MiniMax", **saved))
    assert [layer.residual_scales[0] for layer in config.layers] == [2.5, 2.5, 3.5, 2.5]
    assert [(group.kind, group.num_layers) for group in config.cache.groups] == [("full", 1), ("state", 3)]


def test_minimax_m3_as_published_has_indexers_and_experts_after_its_first_layers() -> None:
    """Published configs have a table of sparse attention and lists of 0 and 1, transformers' names of layers."""
    flags = [0, 0, 0, 1, 1]
    sparse = {
        "use_sparse_attention": True,
        "sparse_index_dim": 64,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 8,
        "sparse_block_size": 64,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": flags,
        "sparse_disable_index_value": flags,
    }
    keys = {"num_hidden_layers": 5, "partial_rotary_factor": 0.5, "rotary_dim": 64, "hidden_act": "swigluoai"}
    published = of(
        "MiniMaxM3Sparse", **keys, num_key_value_heads=4, moe_layer_freq=flags, sparse_attention_config=sparse
    )
    names = ["minimax_m3_sparse" if flag else "full_attention" for flag in flags]
    sizes = {"index_head_dim": 64, "index_n_heads": 2, "index_topk_blocks": 8, "index_block_size": 64}
    kinds = {"mlp_layer_types": ["sparse" if flag else "dense" for flag in flags], "layer_types": names}
    config = decoder_config(published)
    assert config == decoder_config(of("MiniMaxM3VL", **keys, num_key_value_heads=4, **kinds, **sizes))
    assert [layer.blocks is not None for layer in config.layers] == [bool(flag) for flag in flags]
    assert [(group.kind, group.num_layers) for group in config.cache.groups] == [("full", 5), ("index", 2)]
    assert config.layers[4].blocks is not None and config.layers[4].blocks.num_chosen == 512


def test_glm_5_3_as_published_has_pools_of_tokens_in_every_fourth_layer() -> None:
    """Published configs have a table of delta nets, and name the other layers as DeepSeek-V3.2 does."""
    linear = {"head_dim": 64, "num_heads": 8, "short_conv_kernel_size": 4, "safe_gate": True, "gate_lower_bound": None}
    pools = {"index_kpool": 4, "index_kpool_compress": True, "index_kpool_always_select_tail": True, "index_topk": 64}
    names = [*["linear_attention"] * 3, "deepseek_sparse_attention"] * 2
    config = decoder_config(of("Glm5Next", num_hidden_layers=8, linear_attn_config=linear, layer_types=names, **pools))
    named = {"linear_head_dim": 64, "linear_num_heads": 8}
    assert config == decoder_config(of("Glm5Next", num_hidden_layers=8, **named, **pools))
    assert [layer.has_kv for layer in config.layers] == [False, False, False, True] * 2
    kinds = [(group.kind, group.num_layers, group.head_dim) for group in config.cache.groups]
    assert kinds == [("latent", 2, 512), ("index", 2, 256), ("state", 6, 0)]
    assert config.latent is not None and config.latent.indexer is not None
    assert config.latent.indexer.num_chosen == 64 + 3
    assert [layer.experts is not None for layer in config.layers] == [False] * 3 + [True] * 5


@pytest.mark.parametrize(
    "architecture",
    sorted(name for name, family in architectures().items() if not family.only_embeds and name not in REMOTE_CODE),
)
def test_defaults_of_absent_keys_are_those_of_transformers(architecture: str) -> None:
    family = import_module(architectures()[architecture].decoder_config.__module__)
    theirs = config_goldens()["defaults"][architectures()[architecture].architectures[0]]
    assert {key: theirs[key] for key in family.DEFAULTS} == family.DEFAULTS
    assert set(theirs) - set(family.DEFAULTS) <= {"head_dim"}


@pytest.mark.parametrize("name", sorted(rope_goldens()))
def test_rope_scaling_is_read_in_every_format(name: str) -> None:
    case = rope_goldens()[name]
    config = decoder_config({"architectures": ["LlamaForCausalLM"], **case["config"]})
    table = case["config"].get("rope_scaling") or case["config"].get("rope_parameters") or {}
    kind = table.get("rope_type", table.get("type", "default"))
    assert (config.rope_scaling.kind if config.rope_scaling else "default") == kind
    assert config.rope_theta == table.get("rope_theta", case["config"].get("rope_theta"))
    if config.rope_scaling and config.rope_scaling.kind == "yarn":
        assert config.rope_scaling.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)


def test_llama_3_scaling_fields_are_kept() -> None:
    table = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    table["original_max_position_embeddings"] = 128
    expected = RopeScaling("llama3", 8.0, original_max_position=128, low_freq_factor=1.0, high_freq_factor=4.0)
    assert decoder_config(of("Llama", rope_scaling=table)).rope_scaling == expected
    assert decoder_config(of("Llama", rope_parameters={**table, "rope_theta": 5e5})).rope_theta == 5e5


def test_yarn_defaults_are_resolved_and_the_context_stretched() -> None:
    table = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = decoder_config(of("Qwen2", rope_scaling=table))
    assert config.max_position == 2048
    assert config.rope_scaling == RopeScaling(
        "yarn",
        4.0,
        original_max_position=512,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=0.1 * math.log(4.0) + 1.0,
        truncate=True,
    )


def test_yarn_factor_and_original_length_follow_from_the_outer_keys() -> None:
    table = {"rope_type": "yarn", "factor": None}
    scaling = decoder_config(of("Llama", original_max_position_embeddings=128, rope_scaling=table)).rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_max_position) == (4.0, 128)


def test_dynamic_scaling_keeps_the_declared_length() -> None:
    config = decoder_config(of("Llama", rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert config.max_position == 512
    assert config.rope_scaling == RopeScaling("dynamic", 2.0, original_max_position=512)


LONGROPE = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}


def test_longrope_uses_short_factors_unless_a_longer_context_is_requested() -> None:
    longest = {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
    rope = {"rope_scaling": {"type": "longrope", **LONGROPE}, "partial_rotary_factor": 0.25}
    declared = decoder_config(of("Phi3", **longest, **rope))
    assert (declared.max_position, declared.rotary_dim) == (2048, 4)
    assert declared.rope_scaling == RopeScaling(
        "longrope",
        4.0,
        original_max_position=512,
        attention_factor=math.sqrt(1 + math.log(4) / math.log(512)),
        short_divisors=(1.0, 1.5),
        long_divisors=(2.0, 4.0),
    )
    short = replace(declared, max_position=512)
    assert [declared.with_context(length) for length in (None, 512, 513)] == [short, short, declared]
    ratios = inverse_frequencies(declared)[0] / inverse_frequencies(short)[0]
    assert ratios == pytest.approx([1 / 2, 1.5 / 4])


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_longrope_has_had_other_names_in_phi_3(name: str) -> None:
    configs = [
        decoder_config(of("Phi3", partial_rotary_factor=0.25, rope_scaling={"type": kind, **LONGROPE}))
        for kind in (name, "longrope")
    ]
    assert configs[0] == configs[1]


def test_glm_rotates_adjacent_pairs_in_half_of_a_head() -> None:
    config = decoder_config(of("Glm", head_dim=8))
    assert (config.rotary_dim, config.rotary_pairs, config.qkv_bias) == (4, "adjacent", True)
    order = row_order(config)
    assert order is not None
    assert order.tolist() == [0, 2, 4, 5, 1, 3, 6, 7]
    phi = row_order(decoder_config(of("Phi3", head_dim=8, partial_rotary_factor=0.75)))
    assert phi is not None
    assert phi.tolist() == [0, 1, 2, 6, 3, 4, 5, 7]
    assert row_order(decoder_config(of("Phi3"))) is None


def test_linear_scaling_keeps_the_declared_length() -> None:
    config = decoder_config(of("Llama", rope_scaling={"type": "linear", "factor": 4}))
    assert (config.max_position, config.rope_scaling) == (512, RopeScaling("linear", 4.0))


@pytest.mark.parametrize("table", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling_is_none(table: dict[str, Any] | None) -> None:
    assert decoder_config(of("Llama", rope_scaling=table)).rope_scaling is None


@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")],
)
def test_activations_are_mapped(name: str, activation: str) -> None:
    assert decoder_config(of("Llama", hidden_act=name)).activation == activation


def test_every_architecture_has_a_tiny_checkpoint() -> None:
    """With a tower, it is in a folder of its own and has goldens of pictures (test_image_models.py)."""
    paths = [*(DATA / name for name in golden_names()), *DATA.glob("vision/*")]
    paths += [DATA / "encoders" / name for name in sentence_goldens()]
    known = {name: family.architectures[0] for family in families() for name in family.text_part_of}
    named = [json.loads((path / "config.json").read_text())["architectures"][0] for path in paths]
    claimed = {known.get(name, name) for name in named}
    assert claimed >= {family.architectures[0] for family in families()}


@pytest.mark.parametrize("name", golden_names())
def test_tiny_checkpoints_are_read_whole(name: str) -> None:
    golden = golden_checkpoint(name)
    hf = json.loads((golden.path / "config.json").read_text())
    config = decoder_config(hf, json.loads((golden.path / "generation_config.json").read_text()))
    counts = (hf.get(key) for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    stored = next(count for count in counts if count is not None)
    assert config.num_layers == stored - LEFT_OUT.get(name, 0)
    assert golden.logits.shape == (8, config.vocab_size)
    assert 2 in config.eos_token_ids
