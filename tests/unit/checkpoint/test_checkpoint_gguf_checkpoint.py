"""A GGUF file as a Hugging Face checkpoint: config, names, row order, and rejected files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.registry import open_model
from jaxserve.quant.tensor import as_floats
from tests.unit.checkpoint.checkpoint_files import (
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    as_llama_cpp_stores,
    decoder_metadata,
    decoder_weights,
    smollm2_file,
    write_decoder,
    write_gguf,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")


def rejection(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def config_of(path: Path) -> dict[str, Any]:
    return open_model(path).config


def test_recommended_sampling_parameters_have_hugging_face_names(tmp_path: Path) -> None:
    metadata = {"general__sampling__temp": 0.6, "general__sampling__top_k": 20, "general__sampling__mirostat": 1}
    path = write_decoder(tmp_path / "a.gguf", "llama", **metadata, general__sampling__penalty_repeat=1.05)
    found = open_model(path).generation_config
    assert found == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}


def test_llama_config_in_full(tmp_path: Path) -> None:
    path = write_decoder(
        tmp_path / "a.gguf",
        "llama",
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=5,
    )
    checkpoint = open_model(path)
    assert checkpoint.path == path
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
    }
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 5]}


@pytest.mark.parametrize(
    ("architecture", "hf_architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
    ],
)
def test_architectures_have_their_hugging_face_names(tmp_path: Path, architecture: str, hf_architecture: str) -> None:
    config = config_of(write_decoder(tmp_path / "a.gguf", architecture))
    assert config["architectures"] == [hf_architecture]


def test_qwen2_leaves_its_fixed_biases_to_the_family(tmp_path: Path) -> None:
    assert "attention_bias" not in config_of(write_decoder(tmp_path / "a.gguf", "qwen2"))


def test_smollm3_drops_rope_in_every_fourth_layer(tmp_path: Path) -> None:
    weights = {name: value for name, value in decoder_weights().items() if not name.startswith("blk.1")}
    metadata = decoder_metadata("smollm3", block_count=6)
    path = write_gguf(tmp_path / "a.gguf", "smollm3", metadata, {name: ("F32", w) for name, w in weights.items()})
    assert config_of(path)["no_rope_layers"] == [1, 1, 1, 0, 1, 1]


def test_untied_head_is_seen(tmp_path: Path) -> None:
    head = np.ones((VOCAB, HIDDEN), np.float32)
    checkpoint = open_model(write_decoder(tmp_path / "a.gguf", "llama", {"output.weight": head}))
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), head)


def test_explicit_head_size_wins_over_the_quotient(tmp_path: Path) -> None:
    config = config_of(
        write_decoder(
            tmp_path / "a.gguf",
            "qwen3",
            attention__key_length=16,
            attention__value_length=16,
            rope__dimension_count=16,
        )
    )
    assert config["head_dim"] == 16


def test_llama_with_a_window_is_mistral(tmp_path: Path) -> None:
    config = config_of(write_decoder(tmp_path / "a.gguf", "llama", attention__sliding_window=64))
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 64)


def test_names_are_those_of_hugging_face(tmp_path: Path) -> None:
    checkpoint = open_model(write_decoder(tmp_path / "a.gguf", "qwen2"))
    parts = (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    )
    layers = {f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in parts}
    assert set(checkpoint.tensors) == layers | {"model.embed_tokens.weight", "model.norm.weight"}
    info = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    assert (info.name, info.shape, info.stored_dtype, info.num_stored_bytes, info.file) == (
        "model.layers.1.mlp.down_proj.weight",
        (HIDDEN, FFN),
        "F32",
        HIDDEN * FFN * 4,
        checkpoint.path,
    )
    expected = decoder_weights()["blk.1.ffn_down.weight"]
    np.testing.assert_array_equal(checkpoint.read(info.name), expected)


def test_qk_norms_and_biases_have_names(tmp_path: Path) -> None:
    extra = {
        "blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32),
        "blk.0.attn_k_norm.weight": np.ones(HEAD_DIM, np.float32),
        "blk.0.attn_v.bias": np.ones(KV_HEADS * HEAD_DIM, np.float32),
    }
    checkpoint = open_model(write_decoder(tmp_path / "a.gguf", "qwen3", extra))
    prefix = "model.layers.0.self_attn"
    assert {f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight", f"{prefix}.v_proj.bias"} <= set(checkpoint.tensors)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rope_permutation_is_undone_where_llama_cpp_has_it(tmp_path: Path, architecture: str) -> None:
    random = np.random.default_rng(5)
    expected = {
        "q_proj.weight": random.standard_normal((HEADS * HEAD_DIM, HIDDEN), dtype=np.float32),
        "k_proj.weight": random.standard_normal((KV_HEADS * HEAD_DIM, HIDDEN), dtype=np.float32),
        "q_proj.bias": random.standard_normal(HEADS * HEAD_DIM, dtype=np.float32),
        "k_proj.bias": random.standard_normal(KV_HEADS * HEAD_DIM, dtype=np.float32),
    }
    is_permuted = architecture in ("llama", "smollm3")
    stored = {}
    for name, rows in expected.items():
        heads = HEADS if name.startswith("q") else KV_HEADS
        stored[f"blk.1.attn_{name.replace('_proj', '')}"] = as_llama_cpp_stores(rows, heads) if is_permuted else rows
    checkpoint = open_model(write_decoder(tmp_path / "a.gguf", architecture, stored))
    for name, rows in expected.items():
        np.testing.assert_array_equal(checkpoint.read(f"model.layers.1.self_attn.{name}"), rows)


def test_attention_scores_survive_the_change_of_rope(tmp_path: Path) -> None:
    """llama.cpp's adjacent-pair rope on the stored rows scores as the half-split rope on the rows we return."""
    checkpoint = open_model(write_decoder(tmp_path / "a.gguf", "llama"))
    weights = decoder_weights()
    hidden = np.random.default_rng(6).standard_normal((2, HIDDEN))
    angles = 3.0 * 10_000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    scores = []
    for q_rows, k_rows, is_paired in (
        (weights["blk.0.attn_q.weight"], weights["blk.0.attn_k.weight"], True),
        (
            checkpoint.read("model.layers.0.self_attn.q_proj.weight"),
            checkpoint.read("model.layers.0.self_attn.k_proj.weight"),
            False,
        ),
    ):
        query = rotate((q_rows @ hidden[0]).reshape(HEADS, HEAD_DIM), angles, is_paired)
        key = (k_rows @ hidden[1]).reshape(KV_HEADS, HEAD_DIM)
        scores.append(np.einsum("kgh,kh->kg", query.reshape(KV_HEADS, -1, HEAD_DIM), key))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5)


def rotate(heads: np.ndarray, angles: np.ndarray, is_paired: bool) -> np.ndarray:
    half = heads.shape[-1] // 2
    first, second = (heads[:, 0::2], heads[:, 1::2]) if is_paired else (heads[:, :half], heads[:, half:])
    turned_first = first * np.cos(angles) - second * np.sin(angles)
    turned_second = first * np.sin(angles) + second * np.cos(angles)
    if is_paired:
        return np.stack([turned_first, turned_second], axis=-1).reshape(heads.shape)
    return np.concatenate([turned_first, turned_second], axis=-1)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": (
        "llama5",
        {},
        "key 'general.architecture': 'llama5' is not served; the nearest that is: llama; docs/models.md lists all",
    ),
    "adapter": ("llama", {"general__type": "adapter"}, "key 'general.type': expected 'model', found 'adapter'"),
    "experts": ("qwen3", {"expert_count": 8}, "key 'qwen3.expert_count': expected a dense model (0 experts), found 8"),
    "choices": (
        "llama",
        {"expert_count": 8, "expert_used_count": 9},
        "key 'llama.expert_used_count': expected a whole number from 1 to 8, found 9",
    ),
    "no experts": ("olmoe", {}, "key 'olmoe.expert_count': expected a whole number from 1 to 2147483647, found none"),
    "expert width": (
        "qwen3moe",
        {"expert_count": 8, "expert_used_count": 2},
        "key 'qwen3moe.expert_feed_forward_length': expected a whole number from 1 to 2147483647, found none",
    ),
    "missing key": (
        "llama",
        {"block_count": None},
        "key 'llama.block_count': expected a whole number from 1 to 1024, found none",
    ),
    "huge key": (
        "smollm3",
        {"block_count": 4_000_000_000},
        "key 'smollm3.block_count': expected a whole number from 1 to 1024, found 4000000000",
    ),
    "per layer": (
        "llama",
        {"attention__head_count_kv": [2, 1]},
        "key 'llama.attention.head_count_kv': expected a whole number from 1 to 2147483647, found [2, 1]",
    ),
    "epsilon": (
        "llama",
        {"attention__layer_norm_rms_epsilon": math.nan},
        "key 'llama.attention.layer_norm_rms_epsilon': expected a positive number, found nan",
    ),
    "width": (
        "llama",
        {"embedding_length": 64},
        "tensor 'token_embd.weight': expected rows of 64 ('llama.embedding_length'), found shape (96, 32)",
    ),
    "heads": ("llama", {"attention__head_count": 5}, "key 'llama.attention.head_count': expected a divisor of"),
    "partial rope": (
        "llama",
        {"rope__dimension_count": 4},
        "key 'llama.rope.dimension_count': expected the head size 8, found 4",
    ),
    "odd heads": (
        "llama",
        {"attention__key_length": 7, "rope__dimension_count": 7},
        "key 'llama.attention.key_length': expected an even head size, found 7",
    ),
    "q rows": (
        "llama",
        {"attention__key_length": 16, "rope__dimension_count": 16},
        "tensor 'blk.0.attn_q.weight': expected 64 rows (4 heads of 16), found 32",
    ),
    "fewer layers": (
        "llama",
        {"block_count": 1},
        "tensor 'blk.1.attn_norm.weight': expected the tensors of a decoder with 1 layers, found one that has "
        "no place in it",
    ),
    "end token": (
        "llama",
        {"tokenizer__ggml__eos_token_id": VOCAB},
        "key 'tokenizer.ggml.eos_token_id': expected a token below the 96 rows of 'token_embd.weight', found 96",
    ),
    "rope kind": (
        "llama",
        {"rope__scaling__type": "longrope"},
        "key 'llama.rope.scaling.type': expected none, linear or yarn, found 'longrope'",
    ),
    "window": (
        "qwen2",
        {"attention__sliding_window": 64},
        "key 'qwen2.attention.sliding_window': expected none for this architecture, found 64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mismatch_is_named_in_one_line(tmp_path: Path, case: str) -> None:
    architecture, changes, message = REFUSED[case]
    assert rejection(write_decoder(tmp_path / "a.gguf", architecture, **changes)).startswith(message)


def test_missing_embedding_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", decoder_metadata("llama"), {})
    assert rejection(path) == "tensor 'token_embd.weight': expected in the file, found none"


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_exps.weight", "blk.00.attn_q.weight", "blk.0.attn_q.scale", "v.patch"]
)
def test_tensor_without_a_place_is_named(tmp_path: Path, name: str) -> None:
    message = rejection(write_decoder(tmp_path / "a.gguf", "llama", {name: np.ones(32, np.float32)}))
    assert message.startswith(f"tensor {name!r}: expected the tensors of a decoder")


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = open_model(write_decoder(tmp_path / "a.gguf", "llama"))
    with pytest.raises(CheckpointError, match=r"a\.gguf: tensor 'lm_head\.weight': expected in the checkpoint"):
        checkpoint.read("lm_head.weight")


def test_smollm2_opens() -> None:
    checkpoint = open_model(smollm2_file())
    config = checkpoint.config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100_000.0, 1e-5, True)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2])
    assert len(checkpoint.tensors) == 30 * 9 + 2
    name = "model.layers.29.self_attn.k_proj.weight"
    assert checkpoint.tensors[name].stored_dtype == "Q4_1"
    read = as_floats(checkpoint.read(name))
    assert (read.shape, str(read.dtype)) == ((192, 576), "float32")
