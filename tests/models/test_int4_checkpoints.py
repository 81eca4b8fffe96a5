"""Checkpoints stored in 4 bits: which weights are kept, which dequantised, and that both compute the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.config import Config, ModelConfig, ParallelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_config, decoder_of, open_model, read_decoder
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy, quantization_notes
from jaxserve.tools.planning.devices import ACCELERATORS
from jaxserve.tools.planning.fit import model_sizes
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.models.random_checkpoint import write_random
from tests.models.test_fp8_checkpoints import LLAMA
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors
from tests.unit.checkpoint.fp8_files import WHOLE
from tests.unit.checkpoint.int4_files import LAYOUTS, write_int4

SOURCE = golden_checkpoint("llama3_tiny").path
KEPT = [name for name, layout in LAYOUTS.items() if not layout.is_ordered]
ORDERED = [name for name, layout in LAYOUTS.items() if layout.is_ordered]


def loaded(
    folder: Path, quantization: str = "auto", chip: Chip | None = None, num_devices: int = 1
) -> tuple[str, dict[str, np.ndarray]]:
    """Return the chosen format and every parameter."""
    decoder = decoder_of(open_model(folder))
    config = Config(
        model=ModelConfig(model=str(folder), quantization=quantization),
        parallel=ParallelConfig(tensor_parallel_size=num_devices),
    )
    policy = make_policy(config, decoder, chip or Chip("cpu"))
    return policy.quant.name, load(folder, policy)


def restored(name: str, params: dict[str, np.ndarray]) -> np.ndarray:
    """Dequantise a 4-bit matrix."""
    numbers = params[name].astype(np.float32)
    scales = params[f"{name}_scale"].astype(np.float32)
    offsets = params.get(f"{name}_offset", np.zeros_like(scales))
    size = numbers.shape[1] // len(scales)
    return numbers * scales.T.repeat(size, axis=1) + offsets.T.repeat(size, axis=1)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("quantization", ["auto", "int4-weight-only"])
def test_groups_of_neighbours_keep_the_stored_values(tmp_path: Path, name: str, quantization: str) -> None:
    dequantised = write_int4(tmp_path, SOURCE, LAYOUTS[name])
    chosen, params = loaded(tmp_path, quantization)
    assert chosen == "int4-weight-only"
    for tensor, expected in dequantised.items():
        if expected.ndim == 2 and tensor not in WHOLE:
            assert np.abs(params[tensor].astype(np.int8)).max() in (7, 8), "four bits, whatever they are stored in"
            assert (f"{tensor}_offset" in params) == LAYOUTS[name].has_zeros
            np.testing.assert_allclose(restored(tensor, params), expected, rtol=1e-6, atol=1e-6, err_msg=tensor)
        elif quantization == "auto":
            np.testing.assert_array_equal(params[tensor], expected, err_msg=tensor)
        elif expected.ndim == 2:
            assert params[tensor].dtype == np.int8, "tables are rounded where a format is asked for"


@pytest.mark.parametrize("name", ["packed", "gptq zeros", "awq"])
def test_weights_stored_in_4_bits_are_fused_without_rounding(tmp_path: Path, name: str) -> None:
    dequantised = write_int4(tmp_path, SOURCE, LAYOUTS[name])
    _, params = loaded(tmp_path, chip=Chip("gpu", (9, 0)))
    found = "model.layers.1.mlp.gate_up_proj.weight"
    assert params[found].dtype == ml_dtypes.int4
    expected = np.concatenate([dequantised[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    np.testing.assert_allclose(restored(found, params), expected, atol=2**-8 * np.abs(expected).max())


def test_a_matrix_whose_groups_devices_would_split_has_8_bits(tmp_path: Path) -> None:
    """Two devices would have 48 inputs each of a group of 96; other matrices keep 4 bits."""
    dequantised = write_int4(tmp_path, SOURCE, LAYOUTS["packed channels"])
    _, params = loaded(tmp_path, num_devices=2)
    name = "model.layers.0.mlp.down_proj.weight"
    assert params[name].dtype == np.int8 and params[f"{name}_scale"].ndim == 1
    step = params[f"{name}_scale"][:, None]
    assert (np.abs(params[name] * step - dequantised[name]) <= step * 0.501).all()
    name = "model.layers.0.mlp.up_proj.weight"
    assert params[f"{name}_scale"].shape[0] == 1, "64 inputs"


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *itertools.product([*ORDERED, "gptq", "awq"], ["none", "int8-weight-only"]),
        *itertools.product(ORDERED, ["auto"]),
    ],
)
def test_act_order_and_other_formats_dequantise(tmp_path: Path, name: str, quantization: str) -> None:
    dequantised = write_int4(tmp_path, SOURCE, LAYOUTS[name])
    chosen, params = loaded(tmp_path, quantization)
    assert chosen == ("none" if quantization == "auto" else quantization)
    for tensor, expected in dequantised.items():
        if expected.ndim == 2 and chosen == "int8-weight-only":
            step = params[f"{tensor}_scale"][:, None]
            assert (np.abs(params[tensor] * step - expected) <= step * 0.501).all(), tensor
        else:
            np.testing.assert_allclose(params[tensor], expected, rtol=1e-6, atol=1e-6, err_msg=tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_devices"), [("packed", 1), ("gptq zeros", 1), ("awq", 2)])
def test_a_model_computes_what_its_dequantised_weights_compute(tmp_path: Path, name: str, num_devices: int) -> None:
    golden = golden_checkpoint("llama3_tiny")
    small, plain = tmp_path / "small", tmp_path / "plain"
    small.mkdir()
    plain.mkdir()
    write_safetensors(plain / "model.safetensors", write_int4(small, SOURCE, LAYOUTS[name]))
    (plain / "config.json").write_text((SOURCE / "config.json").read_text())
    expected, stored = (
        log_softmax(TinyModel(folder, tensor_parallel_size=size).logits(golden.prompt_ids)[-1])
        for folder, size in ((plain, 1), (small, num_devices))
    )
    common = np.intersect1d(*(np.argsort(each)[-20:] for each in (expected, stored)))
    assert len(common) >= 18
    difference = np.abs(expected - stored)[common].max()
    assert difference < (1e-4 if num_devices == 1 else 0.1), "two devices split 96 inputs: of these 8 bits"


def test_rules_of_gptq_that_change_no_layout_are_served(tmp_path: Path) -> None:
    """Qwen3.5 is published with such rules."""
    write_int4(tmp_path, SOURCE, LAYOUTS["gptq"])
    config = json.loads((tmp_path / "config.json").read_text())
    rules = {
        "lm_head": {},
        "-:.*attn.*": {},
        "+:.*mlp.*": {"bits": 4, "sym": True, "desc_act": False, "damp_percent": 0.1},
    }
    stored = config["quantization_config"]
    del stored["sym"], stored["desc_act"]  # the rule has their defaults
    stored["dynamic"] = rules
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert loaded(tmp_path)[0] == "int4-weight-only"


def test_a_plan_from_the_config_alone_knows_the_sizes(tmp_path: Path) -> None:
    for name in ("packed", "awq"):
        write_int4(tmp_path, SOURCE, LAYOUTS[name])
        config = Config(model=ModelConfig(model=str(tmp_path)))
        found = model_sizes(config, read_decoder(tmp_path)[0], ACCELERATORS["h200"])
        (tmp_path / "model.safetensors").unlink()
        alone = model_sizes(config, read_decoder(tmp_path)[0], ACCELERATORS["h200"])
        assert alone.stored_as == found.stored_as == "int4-weight-only"
        assert alone.weights_bytes == found.weights_bytes
        assert alone.num_parameters == found.num_parameters


def test_notes_advise_users_of_act_order_and_cpus(tmp_path: Path) -> None:
    config = Config(model=ModelConfig(model=str(tmp_path)))
    write_int4(tmp_path, SOURCE, LAYOUTS["gptq order"])
    (note,) = quantization_notes(config, read_decoder(tmp_path)[0], Chip("gpu", (9, 0)))
    assert "--quantization int4-weight-only keeps 4 bits" in note
    write_int4(tmp_path, SOURCE, LAYOUTS["gptq"])
    assert quantization_notes(config, read_decoder(tmp_path)[0], Chip("gpu", (9, 0))) == []
    (note,) = quantization_notes(config, read_decoder(tmp_path)[0], Chip("cpu"))
    assert "int8-weight-only" in note


def _packed(**weights: Any) -> dict[str, Any]:
    table = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": table}},
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"quant_method": "gptq", "bits": 8}, ".bits is 8; supported: 4"),
        ({"quant_method": "gptq"}, ".bits is None; supported: 4"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ".checkpoint_format is 'marlin'; supported: gptq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, ".group_size is 48; supported: -1 and multiples of 32"),
        ({"quant_method": "gptq", "bits": 4, "sym": 1}, ".sym is 1; supported: True, False"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:lm_head": {"bits": 8}}}, ".dynamic '+:lm_head' is {'bits': 8}; supported: rules that leave bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["lm_head"]}, ".dynamic is ['lm_head']; supported: a table of rules"),
        ({"quant_method": "awq", "bits": 3}, ".bits is 3; supported: 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, ".version is 'gemv'; supported: gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, ".zero_point is False; supported: True"),
        (_packed(num_bits=8), ".config_groups.group_0.weights is {'num_bits': 8"),
        (_packed(strategy="tensor"), "weights strategy is 'tensor'; supported: group, channel"),
        (_packed(group_size=8), "weights group_size is 8; supported: -1 and multiples of 32"),
        ({**_packed(), "transform_config": {"R1": 1}}, ".transform_config is {'R1': 1}; supported: none"),
    ],
    ids=str,
)  # fmt: skip
def test_other_forms_are_rejected_in_one_line_with_an_alternative(found: Any, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        decoder_config({**LLAMA, "quantization_config": found})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "changed", "expected"),
    [
        ("gptq", "scales", None, "expected its scales, found none"),
        ("gptq", "scales", np.ones((2, 5), np.float16), "(2, 96), a scale for each of 96 outputs and 32 of 64 inputs"),
        ("gptq", "qzeros", np.zeros((2, 12), np.int32), "expected 8, as for `sym`, found others"),
        ("gptq", "g_idx", np.arange(64, dtype=np.int32) % 2, "expected groups of neighbours, found others"),
        ("gptq", "bias", np.ones(96, np.float16), "'model.layers.1.mlp.up_proj.bias' is not expected"),
        ("gptq order", "g_idx", np.full(64, 2, np.int32), "expected groups 0 to 1"),
        ("awq", "qzeros", np.zeros((2, 11), np.int32), "expected (2, 12) of I32, found shape (2, 11)"),
        ("packed zeros", "weight_zero_point", None, "expected its weight_zero_point, found none"),
    ],
)  # fmt: skip
def test_a_missing_or_contradictory_tensor_is_named(
    tmp_path: Path, name: str, tensor: str, changed: np.ndarray | None, expected: str
) -> None:
    write_int4(tmp_path, SOURCE, LAYOUTS[name])
    file = tmp_path / "model.safetensors"
    stored = open_safetensors(file)
    tensors = {key: np.array(stored.read(key)) for key in stored.tensors}
    tensors[f"model.layers.1.mlp.up_proj.{tensor}"] = changed
    write_safetensors(file, {key: array for key, array in tensors.items() if array is not None})
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_experts_may_have_4_bits(tmp_path: Path) -> None:
    """Kimi K2.5 is published so, as the text part of a multimodal checkpoint whose `text_config` says how it is quantised."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    tiny = json.loads((golden_checkpoint("deepseek_v3_tiny").path / "config.json").read_text())
    write_random(source, {**tiny, "hidden_size": 64, "moe_intermediate_size": 32})
    dequantised = write_int4(folder, source, LAYOUTS["packed"], only=".mlp.experts.")
    stored = open_safetensors(folder / "model.safetensors")
    tensors = {f"language_model.{name}": np.array(stored.read(name)) for name in stored.tensors}
    write_safetensors(folder / "model.safetensors", tensors)
    text = {**json.loads((folder / "config.json").read_text()), "model_type": "kimi_k2"}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    chosen, params = loaded(folder)
    assert chosen == "int4-weight-only"
    assert {name for name, array in params.items() if array.dtype == np.int8} == {
        f"model.layers.1.mlp.experts.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    np.testing.assert_array_equal(
        params["model.layers.1.mlp.shared_experts.up_proj.weight"],
        dequantised["model.layers.1.mlp.shared_experts.up_proj.weight"],
    )
    numbers, scales = (params[f"model.layers.1.mlp.experts.up_proj.weight{end}"][3] for end in ("", "_scale"))
    found = numbers * scales.T.repeat(32, axis=1)
    np.testing.assert_allclose(found, dequantised["model.layers.1.mlp.experts.3.up_proj.weight"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["packed zeros", "gptq zeros", "awq"])
def test_matrices_stored_as_one_are_split_with_their_scales(tmp_path: Path, name: str) -> None:
    """Phi-3 stores QKV, and gate and up, in one matrix each."""
    whole, joined = open_model(SOURCE), tmp_path / "joined"
    joined.mkdir()
    names = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    tensors = {key: np.asarray(whole.read(key), np.float32) for key in whole.tensors}
    for wide, parts in names.items():
        for key in [key for key in tensors if f".{parts[0]}." in key]:
            arrays = [tensors.pop(key.replace(f".{parts[0]}.", f".{part}.")) for part in parts]
            tensors[key.replace(f".{parts[0]}.", f".{wide}.")] = np.concatenate(arrays)
    write_safetensors(joined / "model.safetensors", tensors)
    (joined / "config.json").write_text((SOURCE / "config.json").read_text())
    dequantised = write_int4(tmp_path, joined, LAYOUTS[name])
    _, params = loaded(tmp_path)
    for wide, parts in names.items():
        place = f"model.layers.1.{'self_attn' if wide == 'qkv_proj' else 'mlp'}"
        found = np.concatenate([restored(f"{place}.{part}.weight", params) for part in parts])
        np.testing.assert_allclose(found, dequantised[f"{place}.{wide}.weight"], rtol=1e-6, atol=1e-6)
