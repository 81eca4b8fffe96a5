"""Checkpoints in NVFP4 of both exporters: kept in their blocks, and equal to what their documentation defines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels import nvfp4 as kernels
from jaxserve_kernels.native import float4
from safetensors.numpy import load_file

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_config, decoder_of, open_model, read_decoder
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy, quantization_notes
from jaxserve.sharding.rules import MeshShape
from jaxserve.tools.planning.devices import ACCELERATORS
from jaxserve.tools.planning.fit import model_sizes
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.models.mesh_model import MeshModel
from tests.models.nvfp4_files import FLOATS, PLAIN, Exporter, pack, quantization, write_nvfp4
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors

pytestmark = pytest.mark.slow

SOURCE, EXPERTS = golden_checkpoint("llama3_tiny").path, golden_checkpoint("qwen3_moe_tiny").path
NAME = "model.layers.0.mlp.down_proj"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
CPU = Chip("cpu")
CONFIGS: dict[Exporter, dict[str, Any]] = {"compressed-tensors": quantization(), "modelopt": MODELOPT}


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}


def mixed_groups(weights: dict[str, Any]) -> dict[str, Any]:
    """Return `quantization_config` of compressed-tensors for a checkpoint in NVFP4, and others of these weights."""
    groups = {"group_0": {"weights": FLOATS}, "group_1": {"targets": ["re:.*self_attn.*"], "weights": weights}}
    return quantization(format="mixed-precision", config_groups=groups)


MIXED: dict[Exporter, dict[str, Any]] = {
    "compressed-tensors": mixed_groups(FP8),
    "modelopt": {
        **MODELOPT,
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}},
    },
}


def write(folder: Path, config: dict[str, Any], changes: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    return write_nvfp4(folder, SOURCE, config, changes)


def loaded(folder: Path, quantization: str = "auto", chip: Chip = CPU) -> dict[str, np.ndarray]:
    config = Config(model=ModelConfig(model=str(folder), quantization=quantization))
    return load(folder, make_policy(config, decoder_of(open_model(folder)), chip))


def restored(name: str, params: dict[str, np.ndarray]) -> np.ndarray:
    """Return a matrix as a program dequantises it."""
    scales = kernels.TwoLevelScales(*(jnp.asarray(params[f"{name}{end}"]) for end in ("_scale", "_matrix_scale")))
    return np.asarray(kernels.dequantize(jnp.asarray(params[name]), scales, jnp.float32))


@pytest.mark.parametrize("exporter", CONFIGS)
def test_numbers_and_scales_are_kept_as_they_are_stored(tmp_path: Path, exporter: Exporter) -> None:
    """The weights of a program are those that the exporter defines, in every bit."""
    expected = write_nvfp4(tmp_path, SOURCE, CONFIGS[exporter], exporter=exporter)
    params, stored = loaded(tmp_path), open_safetensors(tmp_path / "model.safetensors")
    packed, of_matrix, row = {
        "compressed-tensors": ("weight_packed", "weight_global_scale", 1),
        "modelopt": ("weight", "weight_scale_2", 0),
    }[exporter]
    np.testing.assert_array_equal(params[f"{NAME}.weight"], stored.read(f"{NAME}.{packed}"))
    scales = stored.read(f"{NAME}.weight_scale").view(np.uint8)
    np.testing.assert_array_equal(params[f"{NAME}.weight_scale"].view(np.uint8), scales.T)
    assert (params[f"{NAME}.weight_matrix_scale"][row] == stored.read(f"{NAME}.{of_matrix}")).all()
    assert (params[f"{NAME}.weight_matrix_scale"][1 - row] == 1).all()
    for name in (f"{NAME}.weight", "model.layers.1.self_attn.o_proj.weight"):
        np.testing.assert_array_equal(restored(name, params), expected[name])
        np.testing.assert_array_equal(open_model(tmp_path).read(name).dequantize(), expected[name])  # type: ignore[union-attr]
    for name in PLAIN[1:]:
        np.testing.assert_array_equal(params[name], expected[name])


def test_a_matrix_takes_four_and_a_half_bits_a_weight(tmp_path: Path) -> None:
    """Two numbers in a byte, a scale for 16, and eight bytes for an output."""
    write(tmp_path, quantization())
    params = loaded(tmp_path)
    shape = (64, 96)
    arrays = [params[f"{NAME}.weight{end}"] for end in ("", "_scale", "_matrix_scale")]
    assert [(each.shape, each.dtype.itemsize) for each in arrays] == [((64, 48), 1), ((6, 64), 1), ((2, 64), 4)]
    assert sum(each.nbytes for each in arrays) == shape[0] * shape[1] * 9 // 16 + 8 * shape[0]
    config = Config(model=ModelConfig(model=str(tmp_path)))
    planned = model_sizes(config, read_decoder(tmp_path)[0], ACCELERATORS["h200"])
    (tmp_path / "model.safetensors").unlink()
    alone = model_sizes(config, read_decoder(tmp_path)[0], ACCELERATORS["h200"])
    assert (alone.stored_as, alone.weights_bytes) == ("nvfp4-weight-only", planned.weights_bytes)
    for capability, said in (
        ((9, 0), "(prompts) upcast all but those of experts first"),
        ((8, 0), "NVFP4 save memory but no time"),
    ):
        (note,) = quantization_notes(config, read_decoder(tmp_path)[0], Chip("gpu", capability))
        assert said in note


def test_matrices_can_be_dequantised_and_are_fused_without_rounding(tmp_path: Path) -> None:
    expected = write(tmp_path, quantization(activations={**FLOATS, "dynamic": "local"}))
    for name, found in loaded(tmp_path, "none").items():
        np.testing.assert_array_equal(found, expected[name], err_msg=name)
    params, name = loaded(tmp_path, chip=Chip("gpu", (9, 0))), "model.layers.1.mlp.gate_up_proj.weight"
    halves = [expected[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    np.testing.assert_array_equal(restored(name, params), np.concatenate(halves))


def test_an_older_checkpoint_has_its_quantization_in_a_file_beside_the_config(tmp_path: Path) -> None:
    expected = write_nvfp4(tmp_path, SOURCE, {}, exporter="modelopt")
    table = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": table}))
    np.testing.assert_array_equal(restored(f"{NAME}.weight", loaded(tmp_path)), expected[f"{NAME}.weight"])
    (tmp_path / "model.safetensors").unlink()
    alone = read_decoder(tmp_path)[0].stored
    assert alone is not None and alone.format == "nvfp4-weight-only"
    beside.write_text(json.dumps({"quantization": "NVFP4"}))
    with pytest.raises(
        CheckpointError, match=r"hf_quant_config\.json: key 'quantization': expected a table, found str"
    ):
        read_decoder(tmp_path)


def test_a_table_in_nvfp4_is_kept_and_serves_as_the_head(tmp_path: Path) -> None:
    table = np.asarray(open_model(SOURCE).read("model.embed_tokens.weight")).astype(np.float32)
    stored, expected = pack("model.embed_tokens.weight", table, "compressed-tensors")
    write(tmp_path / "a", quantization(), {"model.embed_tokens.weight": None, **stored})
    prompt = golden_checkpoint("llama3_tiny").prompt_ids
    model, wide = TinyModel(tmp_path / "a"), TinyModel(tmp_path / "a", quantization="none")
    np.testing.assert_array_equal(restored("model.embed_tokens.weight", loaded(tmp_path / "a")), expected)
    np.testing.assert_allclose(model.logits(prompt), wide.logits(prompt), atol=1e-5, rtol=0)


@pytest.mark.parametrize("exporter", [pytest.param("compressed-tensors", marks=pytest.mark.versions), "modelopt"])
def test_logits_and_tokens_are_those_of_the_dequantised_checkpoint(tmp_path: Path, exporter: Exporter) -> None:
    dequantised = write_nvfp4(tmp_path / "stored", SOURCE, CONFIGS[exporter], exporter=exporter)
    folder = tmp_path / "wide"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", dequantised)
    hf = json.loads((tmp_path / "stored" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: hf[key] for key in hf if key != "quantization_config"}))
    prompt = golden_checkpoint("llama3_tiny").prompt_ids
    stored, wide = TinyModel(tmp_path / "stored"), TinyModel(folder)
    assert stored.policy.quant.name == "nvfp4-weight-only"
    logits, expected = stored.logits(prompt), wide.logits(prompt)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)
    assert stored.greedy(logits[-1], 16) == wide.greedy(expected[-1], 16)


@pytest.mark.versions
@pytest.mark.parametrize("source", [SOURCE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.skipif(not float4.is_built(), reason="needs the native kernels")
def test_native_kernels_give_the_bits_of_dequantised_weights(tmp_path: Path, source: Path) -> None:
    write_nvfp4(tmp_path, source, quantization())
    kept, dequantised = (TinyModel(tmp_path, cpu_kernels="vector", quantization=name) for name in ("auto", "none"))
    assert kept.policy.is_native
    prompt = golden_checkpoint("llama3_tiny").prompt_ids
    np.testing.assert_array_equal(kept.logits(prompt), dequantised.logits(prompt))


@pytest.mark.parametrize(
    ("shape", "exchange", "fused_for"),
    [pytest.param(MeshShape(4), "auto", 4, marks=pytest.mark.exhaustive), (MeshShape(2, expert=2), "all-to-all", 0)],
    ids=str,
)
def test_devices_split_dense_matrices_and_experts(
    tmp_path: Path, shape: MeshShape, exchange: str, fused_for: int
) -> None:
    """Four devices have 8 inputs each of the down projection of an expert: halves of a block with its scale."""
    write_nvfp4(tmp_path / "a", EXPERTS, MODELOPT, exporter="modelopt")
    golden = replace(golden_checkpoint("qwen3_moe_tiny"), path=tmp_path / "a")
    expected = TinyModel(tmp_path / "a", quantization="none").logits(golden.prompt_ids)
    quant = replace(QuantPolicy("nvfp4-weight-only", platform="cpu"), plain_matrices=("lm_head", "model.embed_tokens"))
    model = MeshModel(golden, shape, exchange=exchange, fused_for=fused_for, quant=quant)
    assert sum(array.dtype == ml_dtypes.float8_e4m3fn for array in model.skeleton.arrays) > 6
    for row in model.logits(golden.prompt_ids):
        np.testing.assert_allclose(row[-8:], expected, atol=1e-4, rtol=0)


def in_fp8(name: str, values: np.ndarray) -> tuple[dict[str, np.ndarray | None], np.ndarray]:
    """Return the changes to the stored tensors of a matrix that put it into fp8, and what it then means."""
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
    stored = (values / scales).astype(ml_dtypes.float8_e4m3fn)
    others = dict.fromkeys(f"{name}{end}" for end in ("_packed", "_global_scale", "_scale_2"))
    return {**others, name: stored, f"{name}_scale": scales}, stored.astype(np.float32) * scales


def write_plain(folder: Path, source: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


@pytest.mark.parametrize("exporter", CONFIGS)
def test_other_matrices_in_fp8_are_dequantised(tmp_path: Path, exporter: Exporter) -> None:
    """Attention in fp8 and experts in NVFP4, as Qwen3.6-35B-A3B-NVFP4 is published."""
    whole, changes, meant = open_model(EXPERTS), dict[str, Any](), dict[str, np.ndarray]()
    for name in whole.tensors:
        if ".self_attn." in name and name.endswith("_proj.weight"):
            own, meant[name] = in_fp8(name, np.asarray(whole.read(name)).astype(np.float32))
            changes |= own
    expected = write_nvfp4(tmp_path, EXPERTS, MIXED[exporter], changes, exporter=exporter) | meant
    plain, prompt = write_plain(tmp_path / "plain", EXPERTS, expected), golden_checkpoint("qwen3_moe_tiny").prompt_ids
    kept = TinyModel(tmp_path)
    assert kept.policy.quant.name == "nvfp4-weight-only"
    assert set(meant) <= {f"{module}.weight" for module in kept.policy.quant.plain_matrices}
    np.testing.assert_allclose(kept.logits(prompt), TinyModel(plain).logits(prompt), atol=2e-5, rtol=0)


def test_experts_that_are_stored_together_are_kept(tmp_path: Path) -> None:
    """Step 3.7 Flash is published so."""
    golden = golden_checkpoint("step3p5_tiny")
    stored, meant = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, tensor in load_file(golden.path / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if tensor.ndim == 3:
            parts, weights = zip(*(pack(name, expert.astype(np.float32), "modelopt") for expert in tensor), strict=True)
            stored |= {key: np.stack([part[key] for part in parts]) for key in parts[0]}
            meant[name] = np.stack(weights)
    write_safetensors(tmp_path / "model.safetensors", stored)
    config = json.loads((golden.path / "config.json").read_text()) | {"quantization_config": MODELOPT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept, plain = TinyModel(tmp_path), TinyModel(write_plain(tmp_path / "plain", golden.path, meant))
    assert kept.policy.quant.name == "nvfp4-weight-only"
    np.testing.assert_allclose(kept.logits(golden.prompt_ids), plain.logits(golden.prompt_ids), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({f"{NAME}.weight_global_scale": None}, "expected .*weight_global_scale' beside it, found none"),
        (
            {f"{NAME}.weight_scale": np.ones((2, 2), ml_dtypes.float8_e4m3fn)},
            r"_scale': expected \(\d+, \d+\) of F8_E4M3",
        ),
        ({f"{NAME}.weight_global_scale": np.ones(2, np.float32)}, "expected one number of F32"),
        ({f"{NAME}.weight_packed": np.zeros((2, 7), np.uint8)}, "the last a multiple of 8"),
    ],
    ids=["missing", "scale", "global scale", "packed"],
)
def test_tensors_of_another_shape_are_rejected(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    write(tmp_path, quantization(), changes)
    with pytest.raises(CheckpointError, match=expected):
        open_model(tmp_path)


def test_a_global_scale_of_zero_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, quantization(), {f"{NAME}.weight_global_scale": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match="weight_global_scale': expected a positive number, found 0"):
        open_model(tmp_path).read(f"{NAME}.weight")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (quantization({**FLOATS, "group_size": 32}), ".weights.group_size is 32; supported: 16"),
        (quantization({**FLOATS, "symmetric": False}), ".config_groups.group_0.weights is"),
        (quantization(activations={"num_bits": 8, "type": "int"}), ".input_activations is"),
        (quantization(transform_config={"R1": 1}), ".transform_config is {'R1': 1}; supported: none"),
        (
            {**MODELOPT, "quant_algo": "NVFP4_AWQ"},
            ".quant_algo is 'NVFP4_AWQ'; supported: FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4, W4A16_NVFP4, MIXED_PRECISION, a checkpoint",
        ),
        ({**MODELOPT, "group_size": 32}, ".group_size is 32; supported: 16"),
        (
            {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "W4A16_AWQ"}}},
            ".quantized_layers.'a.b'.quant_algo is 'W4A16_AWQ'; supported: NVFP4, W4A16_NVFP4, FP8",
        ),
        (mixed_groups({"num_bits": 4, "type": "int"}), ".config_groups.group_1.weights is"),
        (mixed_groups({**FP8, "strategy": "group"}), ".config_groups.group_1.weights.strategy is 'group'"),
        (
            mixed_groups({**FP8, "strategy": "block", "block_structure": [64, 64]}),
            ".config_groups.group_1.weights.block_structure is [64, 64]; supported: [128, 128]",
        ),
    ],
    ids=[
        "group size",
        "zeros",
        "activations",
        "rotations",
        "awq",
        "modelopt group size",
        "mixed awq",
        "mixed int",
        "mixed groups of inputs",
        "mixed blocks",
    ],
)
def test_other_kinds_are_rejected(found: dict[str, Any], expected: str) -> None:
    hf = json.loads((SOURCE / "config.json").read_text()) | {"quantization_config": found}
    with pytest.raises(CheckpointError) as caught:
        decoder_config(hf)
    assert expected in str(caught.value)
