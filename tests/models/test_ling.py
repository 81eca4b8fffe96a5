"""Ling 3.0 as published: keys and names, and limits of experts that transformers does not compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from jaxserve.layers.mlp import gated
from jaxserve.models.registry import decoder_config, open_model
from tests.models.goldens import golden_checkpoint
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors

GOLDEN = golden_checkpoint("bailing_hybrid_tiny")
CONFIG = json.loads((GOLDEN.path / "config.json").read_text())
PUBLISHED = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "expert_swiglu_limit_list": None,
    "gated_attention_proj_granularity_type": "head_wise",
    "group_norm_size": 1,
    "linear_silu": True,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 16,
    "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0,
    "partial_rotary_factor": 0.5,
    "pregate_inference": False,
    "q_lora_rank": None,
    "rope_interleave": True,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "rope_type": "default"},
    "score_function": "sigmoid",
    "share_expert_swiglu_limit_list": None,
    "topk_method": "noaux_tc",
    "use_bias": False,
    "use_mla_nope": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
}


def test_keys_of_published_configs_are_known() -> None:
    assert decoder_config({**CONFIG, **PUBLISHED}) == decoder_config(CONFIG)
    compressed = decoder_config({**CONFIG, **PUBLISHED, "q_lora_rank": 24}).latent
    assert compressed is not None and compressed.query_rank == 24


def test_attention_may_have_the_published_name_of_its_output_projection(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN.path, tmp_path, dirs_exist_ok=True)
    stored = open_safetensors(GOLDEN.path / "model.safetensors")
    names = {name: name.replace(".1.attention.o_proj.", ".1.attention.dense.") for name in stored.tensors}
    assert names.keys() != {*names.values()}
    write_safetensors(tmp_path / "model.safetensors", {new: np.array(stored.read(old)) for old, new in names.items()})
    assert open_model(tmp_path).tensors.keys() == open_model(GOLDEN.path).tensors.keys()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kda_lower_bound": 1.0}, "kda_lower_bound is 1.0; supported: a number from -100 to below 0"),
        ({"layer_types": None, "num_hidden_layers": 3}, "layer_group_size is 2; supported: a divisor of the 3 layers"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "gated_attention_proj_granularity_type"),
        ({"no_kda_lora": False}, "no_kda_lora is false"),
        ({"use_mla_nope": True}, "use_mla_nope is true"),
        ({"score_function": "softmax"}, "score_function is 'softmax'"),
        ({"moe_shared_expert_intermediate_size": 32}, "moe_shared_expert_intermediate_size is 32; supported: 16"),
        ({"expert_swiglu_limit_list": [0, -1.0, 0]}, "expert_swiglu_limit_list is"),
        ({"share_expert_swiglu_limit_list": 4.0}, "share_expert_swiglu_limit_list is 4.0; supported: a list of numbers"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_with_its_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config({**CONFIG, **keys})


def test_experts_have_the_limits_of_their_layer() -> None:
    lists = {"expert_swiglu_limit_list": [9, 0, 4.0, 7], "share_expert_swiglu_limit_list": [9, 5]}
    _, *sparse = decoder_config({**CONFIG, **lists}).layers
    assert [(each.experts.limit, each.experts.shared_limit) for each in sparse if each.experts] == [
        (None, 5),
        (4, None),
    ]


def test_a_limit_bounds_the_activated_gate_from_above_and_up_from_both_sides() -> None:
    gate, up = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32) * 3
    expected = np.minimum(gate, 1.5) * np.clip(up, -1.5, 1.5)
    np.testing.assert_array_equal(gated(jnp.asarray(gate), jnp.asarray(up), 1.5), expected)
    np.testing.assert_array_equal(gated(jnp.asarray(gate), jnp.asarray(up), None), gate * up)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("key", ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"])
def test_limits_change_what_a_model_computes(key: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN.path, tmp_path, dirs_exist_ok=True)
    distances = []
    for limit in (1e3, 0.05):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: [0, limit, limit]}))
        logits = TinyModel(tmp_path).logits(GOLDEN.prompt_ids)
        distances.append(float(np.abs(logits[-8:] - GOLDEN.logits).max()))
    assert distances[0] < 1e-4 < 0.05 < distances[1]
