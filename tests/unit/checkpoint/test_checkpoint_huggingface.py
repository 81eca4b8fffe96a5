"""Hugging Face directories: whole, in shards, and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.huggingface import open_huggingface
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import families, open_model
from tests.unit.checkpoint.checkpoint_files import write_safetensors

INDEX = "model.safetensors.index.json"
A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float16)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "evil.C"}})
    write_safetensors(tmp_path / "model.safetensors", {"a": A, "b": B})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"architectures": ["LlamaForCausalLM"]})
    write_safetensors(tmp_path / "model-1.safetensors", {"a": A})
    write_safetensors(tmp_path / "model-2.safetensors", {"b": B})
    write_json(tmp_path / INDEX, {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    return tmp_path


def rejection(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_single_file_is_opened(single: Path) -> None:
    checkpoint = open_huggingface(single, ())
    assert checkpoint.path == single
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.generation_config == {}
    info = checkpoint.tensors["a"]
    assert (info.name, info.shape, info.stored_dtype, info.num_stored_bytes) == ("a", (2, 3), "F32", 24)
    assert info.file == single / "model.safetensors"
    np.testing.assert_array_equal(checkpoint.read("a"), A)
    np.testing.assert_array_equal(checkpoint.read("b"), B)


def test_shards_are_opened_as_one(sharded: Path) -> None:
    checkpoint = open_huggingface(sharded, ())
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.tensors["b"].file == sharded / "model-2.safetensors"
    np.testing.assert_array_equal(checkpoint.read("a"), A)
    np.testing.assert_array_equal(checkpoint.read("b"), B)


def test_generation_config_is_read(single: Path) -> None:
    write_json(single / "generation_config.json", {"eos_token_id": [1, 2]})
    assert open_huggingface(single, ()).generation_config == {"eos_token_id": [1, 2]}


def test_unknown_tensor_is_named(single: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor 'c': expected in the checkpoint, found none"):
        open_huggingface(single, ()).read("c")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_weights_are_rejected(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "config.json", {})
    (tmp_path / name).write_bytes(b"\x80\x02")
    assert rejection(tmp_path).startswith(f"{tmp_path} has only pickle weights; convert to safetensors")


def test_directory_of_gguf_files_says_to_give_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    message = rejection(tmp_path)
    assert message.endswith(f"found GGUF files; give one of them, such as {tmp_path / 'tiny.gguf'}")


def test_empty_directory_is_named(tmp_path: Path) -> None:
    assert rejection(tmp_path) == f"{tmp_path}: expected model.safetensors or {INDEX}, found neither"


def test_missing_config_is_named(single: Path) -> None:
    (single / "config.json").unlink()
    assert rejection(single).startswith(f"{single / 'config.json'}: expected the model's configuration")


@pytest.mark.parametrize(
    ("text", "found"),
    [(b"{", "expected JSON, found Expecting"), (b"[1]", "expected a JSON object, found list"), (b"\xff", "not UTF-8")],
)
def test_damaged_config_is_named(single: Path, text: bytes, found: str) -> None:
    (single / "config.json").write_bytes(text)
    message = rejection(single)
    assert message.startswith(f"{single / 'config.json'}: ")
    assert found in message


@pytest.mark.parametrize(
    "name",
    [
        "../model-1.safetensors",
        "/etc/passwd",
        "sub/model-1.safetensors",
        "sub\\m.safetensors",
        "a.bin",
        ".safetensors",
        3,
    ],
)
def test_index_may_only_name_files_beside_it(sharded: Path, name: object) -> None:
    write_json(sharded / INDEX, {"weight_map": {"a": name}})
    message = rejection(sharded)
    assert message.startswith(f"{sharded / INDEX}: tensor 'a': expected the plain name of a .safetensors file")
    assert message.endswith(f"found {str(name)!r}")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_index_without_a_weight_map_is_named(sharded: Path, index: object) -> None:
    write_json(sharded / INDEX, index)
    assert "key 'weight_map': expected a table of tensor to file name" in rejection(sharded)


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    message = f"{sharded / INDEX}: expected the shard 'model-2.safetensors' beside it, found no such file"
    assert rejection(sharded) == message


def test_tensor_missing_from_its_shard_is_named(sharded: Path) -> None:
    write_json(sharded / INDEX, {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}})
    assert rejection(sharded) == f"{sharded / 'model-1.safetensors'}: tensor 'b': expected here by {INDEX}, found none"


def test_truncated_shard_is_named(sharded: Path) -> None:
    shard = sharded / "model-2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert rejection(sharded).startswith(f"{shard}: tensor 'b': expected a file of at least")


@pytest.mark.parametrize(
    "write",
    [lambda path: path.write_bytes(b"\x80\x02pickle"), lambda path: path.write_bytes(b"")],
    ids=["pickle", "empty"],
)
def test_file_of_another_kind_is_rejected(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "model.bin"
    write(path)
    assert "expected a GGUF file or a directory with config.json and safetensors" in rejection(path)


def test_missing_path_is_named(tmp_path: Path) -> None:
    assert rejection(tmp_path / "nope") == f"{tmp_path / 'nope'}: cannot be read: No such file or directory"


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_modules"])
def test_multi_token_prediction_layers_are_left_out(tmp_path: Path, key: str) -> None:
    names = ("model.layers.1.mlp.gate.weight", "model.layers.2.eh_proj.weight", "model.layers.21.norm.weight")
    write_safetensors(tmp_path / "model.safetensors", {name: np.ones(2, np.float32) for name in names})
    config = {"architectures": ["Any"], "num_hidden_layers": 2, key: 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sorted(open_huggingface(tmp_path, ()).tensors) == [names[0], names[2]]


def write_norms(directory: Path, heads: list[int]) -> None:
    """Write norms of query heads as StableLM 2 12B stores them; the weights are the number of the head."""
    write_json(directory / "config.json", {"architectures": ["StableLmForCausalLM"]})
    names = {head: f"model.layers.0.self_attn.q_layernorm.norms.{head}.weight" for head in heads}
    tensors = {name: np.full(2, head, np.float32) for head, name in names.items()}
    write_safetensors(directory / "model.safetensors", tensors)


def test_norms_of_heads_are_one_vector_in_the_order_of_the_heads(tmp_path: Path) -> None:
    write_norms(tmp_path, list(range(11)))
    checkpoint, name = open_huggingface(tmp_path, families()), "model.layers.0.self_attn.q_norm.weight"
    assert checkpoint.tensors[name].shape == (22,)
    np.testing.assert_array_equal(checkpoint.read(name), np.repeat(np.arange(11, dtype=np.float32), 2))


def test_a_missing_norm_of_a_head_is_refused(tmp_path: Path) -> None:
    write_norms(tmp_path, [0, 2])
    with pytest.raises(CheckpointError, match=r"q_norm\.norms\.0\.weight': shards numbered from 0"):
        open_huggingface(tmp_path, families())
