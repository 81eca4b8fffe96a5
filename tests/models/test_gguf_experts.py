"""GGUF files with experts: the logits of the safetensors they were made from, and experts in blocks.

A file says nothing of how tokens are decoded, so where all its weights are dequantised, only prompts are computed;
tests/models/test_weight_formats.py generates with the same models.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.quant.tensor import as_floats
from tests.models.goldens import golden_checkpoint
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import decoder_metadata, stored, write_gguf, write_safetensors
from tests.unit.checkpoint.gguf_families import llama4_in_a_file, nemotron_h_kinds, write_as_gguf

pytestmark = pytest.mark.slow
KEPT = "gguf-weight-only"


def written(folder: Path, name: str, kind: str = "F32") -> Path:
    source = golden_checkpoint(name).path
    hf = json.loads((source / "config.json").read_text())
    return write_as_gguf(folder / "a.gguf", open_model(source), hf, kind)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral_tiny",
        "qwen2_moe_tiny",
        "glm4_moe_tiny",
        "deepseek_v3_tiny",
        "granitemoehybrid_tiny",
        "lfm2_tiny",
        "falcon_h1_tiny",
        "qwen3_next_tiny",
        *(
            pytest.param(f"{name}_tiny", marks=pytest.mark.exhaustive)
            for name in (
                "granitemoe",
                "granitemoeshared_odd",
                "granitemoehybrid_dense",
                "lfm2_odd",
                "falcon_h1_odd",
                "qwen3_next_odd",
                "qwen3_5",
                "qwen3_5_moe",
                "qwen3_5_odd",
            )
        ),
    ],
)
def test_logits_equal_those_of_the_safetensors(tmp_path: Path, name: str) -> None:
    """Files named as Llama's, with rows in llama.cpp's order, with factors, and with shared experts and dense layers."""
    golden, model = golden_checkpoint(name), TinyModel(written(tmp_path, name))
    np.testing.assert_allclose(model.logits(golden.prompt_ids), golden.logits, atol=1e-4, rtol=0)


def in_a_file(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the config with what a file can hold: no key has DeepSeek's `mscale`, which published models set to
    `mscale_all_dim`, nor Llama 4's factors, nor LFM2's factor on the weights of experts."""
    if hf["architectures"] == ["Llama4ForCausalLM"]:
        return llama4_in_a_file(hf)
    if hf["architectures"] == ["Lfm2MoeForCausalLM"]:
        return hf | {"routed_scaling_factor": 1.0}
    scaling = hf["rope_scaling"]
    return hf | {"rope_scaling": scaling | {"mscale": scaling["mscale_all_dim"]}}


@pytest.mark.parametrize(
    "name",
    ["deepseek_v2_tiny", "llama4_tiny", pytest.param("llama4_odd_tiny", marks=pytest.mark.exhaustive), "lfm2_moe_tiny"],
)
def test_models_with_what_a_file_can_hold_give_the_logits_of_their_safetensors(tmp_path: Path, name: str) -> None:
    golden, folder = golden_checkpoint(name), tmp_path / "safetensors"
    shutil.copytree(golden.path, folder)
    hf = in_a_file(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(hf))
    expected, model = TinyModel(folder), TinyModel(write_as_gguf(tmp_path / "a.gguf", open_model(folder), hf))
    others, logits = expected.logits(golden.prompt_ids), model.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits, others, atol=1e-5, rtol=0)
    assert np.abs(logits - golden.logits).max() > 0.001


def with_layers(folder: Path, name: str, kept: list[int], **changed: Any) -> dict[str, Any]:
    """Write a checkpoint with some of its layers, and with these keys of its config; return the config."""
    source = golden_checkpoint(name).path
    hf = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": len(kept)} | changed
    tensors = {}
    for stored_name, values in load_file(source / "model.safetensors").items():
        match = re.match(r"model\.layers\.(\d+)", stored_name)
        if match is None:
            tensors[stored_name] = values
        elif int(match[1]) in kept:
            tensors[f"model.layers.{kept.index(int(match[1]))}{stored_name[match.end() :]}"] = values
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    return hf


def check_logits_are_those_of_the_safetensors(path: Path, folder: Path, prompt: np.ndarray) -> None:
    np.testing.assert_allclose(TinyModel(path).logits(prompt), TinyModel(folder).logits(prompt), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nemotron_h_tiny", "moe"),
        ("nemotron_h_tiny", "mlp"),
        pytest.param("nemotron_h_odd_tiny", "mlp", marks=pytest.mark.exhaustive),
        pytest.param("nemotron_h_odd_tiny", "moe", marks=pytest.mark.exhaustive),
    ],
)
def test_nemotron_h_dense_or_with_experts_gives_the_logits_of_its_safetensors(
    tmp_path: Path, name: str, kind: str
) -> None:
    """Files of both architectures, `nemotron_h` and `nemotron_h_moe`, the latter also with experts of another width."""
    golden, folder = golden_checkpoint(name), tmp_path / "safetensors"
    kinds = nemotron_h_kinds(json.loads((golden.path / "config.json").read_text()))
    kept = [index for index, each in enumerate(kinds) if each != kind]
    own = [kinds[index] for index in kept]
    hf = with_layers(folder, name, kept, layers_block_type=own, n_group=1, topk_group=1)
    path = write_as_gguf(tmp_path / "a.gguf", open_model(folder), hf)
    assert open_gguf(path).metadata["general.architecture"] == ("nemotron_h" if kind == "moe" else "nemotron_h_moe")
    check_logits_are_those_of_the_safetensors(path, folder, golden.prompt_ids)


def test_glm_4_7_flash_gives_the_logits_of_its_safetensors(tmp_path: Path) -> None:
    """Its dense layers come first, as in every file."""
    name, folder = "glm4_moe_lite_tiny", tmp_path / "safetensors"
    hf = with_layers(folder, name, [0, 1], mlp_layer_types=["dense", "sparse"])
    path = write_as_gguf(tmp_path / "a.gguf", open_model(folder), hf)
    check_logits_are_those_of_the_safetensors(path, folder, golden_checkpoint(name).prompt_ids)


def test_gates_and_inputs_of_experts_in_one_tensor_are_split(tmp_path: Path) -> None:
    golden = golden_checkpoint("qwen3_moe_tiny")
    hf, source = json.loads((golden.path / "config.json").read_text()), open_model(golden.path)
    path = write_as_gguf(tmp_path / "a.gguf", source, hf, joins_experts=True)
    assert "blk.2.ffn_gate_up_exps.weight" in open_gguf(path).tensors
    logits = TinyModel(path).logits(golden.prompt_ids)
    np.testing.assert_allclose(logits, golden.logits, atol=1e-4, rtol=0)
    joined = open_model(write_as_gguf(tmp_path / "b.gguf", source, hf, "Q8_0", joins_experts=True))
    apart = open_model(write_as_gguf(tmp_path / "c.gguf", source, hf, "Q8_0"))
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.2.mlp.experts.5.{part}.weight"
        np.testing.assert_array_equal(joined.read(name).blocks, apart.read(name).blocks)  # type: ignore[union-attr]
        assert joined.tensors[name] == replace(apart.tensors[name], file=joined.tensors[name].file)


def test_experts_keep_their_blocks(tmp_path: Path) -> None:
    name = "qwen3_moe_tiny"
    golden, path = golden_checkpoint(name), written(tmp_path, name, "Q8_0")
    expected, found = open_model(golden.path), open_model(path)
    own = "model.layers.2.mlp.experts.5.up_proj.weight"
    rows = expected.read(own).astype(np.float32)
    np.testing.assert_array_equal(found.read(own).blocks, stored("Q8_0", rows)[1])  # type: ignore[union-attr]
    kept, dequantised = TinyModel(path, quantization=KEPT), TinyModel(path)
    logits, others = kept.logits(golden.prompt_ids), dequantised.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits, others, atol=1e-5 * np.abs(others).max(), rtol=0)
    assert 0 < np.abs(logits - golden.logits).mean() < 0.02 * golden.logits.std()
    assert kept.greedy(logits[-1], 32) == dequantised.greedy(others[-1], 32)


def test_gpt_oss_in_mxfp4_gives_the_tokens_of_its_safetensors(tmp_path: Path) -> None:
    """The numbers of the file are written as safetensors in float32, with the limit of gates that llama.cpp hard-codes."""
    name = "gpt_oss_tiny"
    golden, path = golden_checkpoint(name), written(tmp_path, name, "MXFP4")
    found, folder = open_model(path), tmp_path / "safetensors"
    shutil.copytree(golden.path, folder)
    hf = json.loads((folder / "config.json").read_text()) | {"swiglu_limit": 7.0}
    (folder / "config.json").write_text(json.dumps(hf))
    tensors = {}
    for stored_name, values in ((each, as_floats(found.read(each))) for each in found.tensors):
        tensors[stored_name.replace(".mlp.gate.", ".mlp.router.")] = values.astype(np.float32)
    assert found.tensors["model.layers.1.mlp.experts.3.down_proj.weight"].stored_dtype == "MXFP4"
    write_safetensors(folder / "model.safetensors", tensors)
    model, expected = TinyModel(path), TinyModel(folder)
    logits, others = model.logits(golden.prompt_ids), expected.logits(golden.prompt_ids)
    np.testing.assert_allclose(logits, others, atol=1e-5, rtol=0)
    tokens = expected.greedy(others[-1], 64)
    assert model.greedy(logits[-1], 64) == tokens
    assert np.abs(logits - golden.logits).max() > 0.01
    kept = TinyModel(path, quantization="mxfp4-weight-only")
    in_blocks = kept.logits(golden.prompt_ids)
    np.testing.assert_allclose(in_blocks, others, atol=1e-5, rtol=0)
    assert kept.greedy(in_blocks[-1], 64) == tokens


def write_latent_blocks(path: Path) -> Path:
    """Write a DeepSeek-V2 of random weights, one layer dense and one with experts, all of whose matrices are in Q8_0."""
    random, width, rank, heads, experts = np.random.default_rng(7), 64, 32, 2, 4
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (96, width), "output": (96, width)}
    for layer in range(2):
        block = {
            "attn_q": (heads * 64, width),
            "attn_kv_a_mqa": (rank + 32, width),
            "attn_k_b": (heads, rank, 32),
            "attn_v_b": (heads, 32, rank),
            "attn_output": (width, heads * 32),
        }
        stack, dense = (), ("ffn_gate", "ffn_up", "ffn_down")
        if layer:
            stack, dense = (experts,), ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
            block |= {"ffn_gate_inp": (experts, width)}
            block |= {f"ffn_{part}_shexp": (32, width) for part in ("gate", "up")} | {"ffn_down_shexp": (width, 32)}
        gate, up, down = dense
        block |= {gate: (*stack, 32, width), up: (*stack, 32, width), down: (*stack, width, 32)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    tensors = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=np.float32) / 8
        tensors[f"{name}.weight"] = ("F32", values) if "gate_inp" in name else stored("Q8_0", values)
    norms = {f"blk.{layer}.{name}": width for layer in range(2) for name in ("attn_norm", "ffn_norm")}
    norms |= {"output_norm": width, "blk.0.attn_kv_a_norm": rank, "blk.1.attn_kv_a_norm": rank}
    ones = {f"{name}.weight": ("F32", np.ones(size, np.float32)) for name, size in norms.items()}
    keys = {
        "embedding_length": width,
        "feed_forward_length": 32,
        "leading_dense_block_count": 1,
        "expert_count": experts,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length_mla": 64,
        "attention.value_length_mla": 32,
        "rope.dimension_count": 32,
    }
    metadata = decoder_metadata("deepseek2") | {f"deepseek2.{key}": value for key, value in keys.items()}
    return write_gguf(path, "deepseek2", metadata, tensors | ones)


def test_latent_attention_keeps_its_blocks_but_those_of_keys_and_values(tmp_path: Path) -> None:
    path, tokens = write_latent_blocks(tmp_path / "a.gguf"), np.arange(3, 40)
    kinds = dict(decoder_of(open_model(path)).stored.stored_kinds)  # type: ignore[union-attr]
    attention = "model.layers.0.self_attn"
    assert {kinds[f"{attention}.{name}_proj"] for name in ("q", "o")} | {kinds[f"{attention}.kv_a_proj_with_mqa"]} == {
        "Q8_0"
    }
    assert f"{attention}.kv_b_proj" not in kinds
    expected = TinyModel(path).logits(tokens)
    found = TinyModel(path, quantization=KEPT).logits(tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    ("name", "projections"),
    [
        ("granitemoehybrid_tiny", ("mamba.in_proj", "mamba.out_proj")),
        ("falcon_h1_tiny", ("mamba.in_proj", "mamba.out_proj")),
        ("lfm2_tiny", ("conv.in_proj", "conv.o_proj")),
    ],
)
def test_mixers_keep_the_blocks_of_their_projections(tmp_path: Path, name: str, projections: tuple[str, ...]) -> None:
    golden, folder = golden_checkpoint(name), golden_checkpoint(name).path
    hf = json.loads((folder / "config.json").read_text())
    path = write_as_gguf(tmp_path / "a.gguf", open_model(folder), hf, matrices="Q8_0")
    kinds = dict(decoder_of(open_model(path)).stored.stored_kinds)  # type: ignore[union-attr]
    assert {f"model.layers.0.{projection}" for projection in projections} <= kinds.keys()
    expected = TinyModel(path).logits(golden.prompt_ids)
    found = TinyModel(path, quantization=KEPT).logits(golden.prompt_ids)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    assert 0 < np.abs(found - golden.logits).mean() < 0.1 * golden.logits.std()
