"""Models that ship as code beside their checkpoints: keys of published configs, and what of them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from jaxserve.layers.routing import route
from jaxserve.models.registry import architectures, decoder_config, open_model, read_mtp_layer
from tests.models.goldens import DATA, REMOTE_CODE, golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors

BLOCK = {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": {"ffn_mult": 1.5, "no_op": False}}


def of(name: str, **keys: Any) -> dict[str, Any]:
    """Return the config of a tiny checkpoint with other keys."""
    return json.loads((DATA / f"{name}_tiny" / "config.json").read_text()) | keys


def test_each_model_without_a_class_in_transformers_is_served() -> None:
    assert set(REMOTE_CODE) <= architectures().keys()


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("bailing_moe", {"use_bias": True}, "use_bias is true; supported: false or null"),
        ("bailing_moe", {"norm_head": True}, "norm_head is true"),
        ("bailing_moe", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("bailing_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("bailing_moe_v2", {"moe_shared_expert_intermediate_size": 64}, "intermediate_size is 64; supported: 32"),
        ("bailing_moe_v2", {"score_function": "softmax"}, "score_function is 'softmax'; supported: 'sigmoid'"),
        ("bailing_moe_v2", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("bailing_moe_v2", {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is false"),
        ("minicpm", {"num_experts": 8}, "num_experts is 8; supported: 0 or null"),
        ("minicpm", {"sparse_config": [1]}, r"sparse_config is \[1\]; supported: a table or null"),
        ("minicpm", {"sparse_config": {"dense_len": 0}}, "sparse_config.dense_len is 0; supported: an integer from 2"),
        ("exaone", {"num_layers": 0}, "num_layers is 0; supported: an integer from 1"),
        ("exaone", {"activation_function": "mish"}, "activation_function is 'mish'"),
        ("internlm2", {"bias": 1}, "bias is 1; supported: true or false"),
        ("nemotron_nas", {"block_configs": None}, "block_configs is null; supported: a list of tables, one for each"),
        ("nemotron_nas", {"num_hidden_layers": 4}, "one for each of the 4 layers"),
        ("nemotron_nas", {"position_embedding_type": "mistral_yarn"}, "position_embedding_type is 'mistral_yarn'"),
    ],
)
def test_what_is_not_computed_is_refused_with_its_key(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_config(of(name, **keys))


@pytest.mark.parametrize(
    ("part", "keys", "message"),
    [
        ("attention", {"replace_with_linear": True}, r"block_configs\[0\].attention.replace_with_linear is true"),
        ("attention", {"window_length": 8}, r"block_configs\[0\].attention.window_length is 8"),
        ("attention", {"n_heads_in_group": 3}, r"n_heads_in_group is 3; supported: a divisor of num_attention_heads"),
        ("ffn", {"replace_with_linear": True}, r"block_configs\[0\].ffn.replace_with_linear is true"),
        ("ffn", {"ffn_mult": -1.0}, r"block_configs\[0\].ffn.ffn_mult is -1.0"),
    ],
)
def test_a_block_that_is_not_computed_is_refused_with_its_layer(part: str, keys: dict[str, Any], message: str) -> None:
    block = {**BLOCK, part: {**BLOCK[part], **keys}}
    with pytest.raises(CheckpointError, match=message):
        decoder_config(of("nemotron_nas", num_hidden_layers=1, block_configs=[block]))


def test_layers_of_llama_nemotron_have_their_own_heads_and_widths_or_are_left_out() -> None:
    config = decoder_config(of("nemotron_nas"))
    kinds = [(layer.num_kv_heads, layer.intermediate_size) for layer in config.layers]
    assert kinds == [(2, 256), (None, 72), (1, None), (4, 40)]
    assert [(layer.has_kv, layer.has_mlp) for layer in config.layers] == [
        (own is not None, b is not None) for own, b in kinds
    ]
    empty = {part: {"no_op": True} for part in BLOCK}
    with pytest.raises(CheckpointError, match="a layer with attention and one with a feed-forward block"):
        decoder_config(of("nemotron_nas", num_hidden_layers=1, block_configs=[empty]))


@pytest.mark.parametrize(
    ("sparse", "longest"), [({"dense_len": 257}, 256), ({}, 8191), (None, 32_768), ({"dense_len": 65_536}, 32_768)]
)
def test_minicpm_serves_texts_in_which_attention_is_dense(sparse: dict[str, int] | None, longest: int) -> None:
    assert decoder_config(of("minicpm", max_position_embeddings=1 << 15, sparse_config=sparse)).max_position == longest


def test_ling_divides_weights_by_their_sum_if_there_are_several() -> None:
    for name in ("bailing_moe", "bailing_moe_v2"):
        experts = [decoder_config(of(name, num_experts_per_tok=count)).experts for count in (1, 2)]
        assert [each.is_normalized for each in experts if each is not None] == [False, True]
    plain = decoder_config(of("bailing_moe", norm_topk_prob=False)).experts
    assert plain is not None and not plain.is_normalized


def test_the_mtp_layer_of_ling_2_is_read_like_its_other_layers(tmp_path: Path) -> None:
    """A layer after the last one, with norms of its inputs, their projection, and a norm before the output head."""
    golden = golden_checkpoint("bailing_moe_v2_tiny")
    config = of("bailing_moe_v2", num_nextn_predict_layers=1)
    stored = open_safetensors(golden.path / "model.safetensors")
    tensors = {name: np.array(stored.read(name)) for name in stored.tensors}
    last, own = "model.layers.2.", "model.layers.3."
    norm = tensors["model.norm.weight"]
    added = {own + name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    added |= {f"{own}{name}.weight": norm for name in ("enorm", "hnorm", "final_layernorm")}
    added[f"{own}eh_proj.weight"] = np.zeros((len(norm), 2 * len(norm)), norm.dtype)
    write_safetensors(tmp_path / "model.safetensors", tensors | added)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_model(tmp_path).tensors.keys() == open_model(golden.path).tensors.keys()
    layer, checkpoint = read_mtp_layer(tmp_path)
    assert checkpoint is not None and layer.experts == decoder_config(config).experts
    block = {name.replace(last, "model.layers.0.") for name in open_model(golden.path).tensors if name.startswith(last)}
    around = {f"model.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "norm")}
    assert checkpoint.tensors.keys() == block | around


def test_sarvam_is_ling_2_without_groups_of_experts_and_with_whole_rotation() -> None:
    hf = {key: value for key, value in of("bailing_moe_v2").items() if key not in ("n_group", "topk_group")}
    del hf["partial_rotary_factor"]
    own = decoder_config(hf | {"architectures": ["SarvamMoEForCausalLM"]})
    assert own == decoder_config(hf | {"n_group": 1, "topk_group": 1})
    assert own.rotary_dim is None and own.experts is not None and own.experts.num_groups == 1


def test_a_constant_in_a_routers_biases_changes_no_choice_of_experts() -> None:
    """The code of Sarvam subtracts their mean."""
    config = decoder_config(of("bailing_moe_v2")).experts
    assert config is not None
    logits, bias = np.random.default_rng(0).standard_normal((2, 50, config.num_experts)).astype(np.float32)
    count = jnp.asarray(len(logits))
    own, other = (route(jnp.asarray(logits), count, config, jnp.asarray(bias[0] + lower)) for lower in (0.0, -2.0))
    np.testing.assert_array_equal(own.experts, other.experts)
    np.testing.assert_array_equal(own.weights, other.weights)
