"""Checkpoints stored in NVFP4 by compressed-tensors: dequantised as its documentation defines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_config, decoder_of, open_model
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy, quantization_notes
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors

SOURCE = golden_checkpoint("llama3_tiny").path
PLAIN = ("lm_head.weight", "model.embed_tokens.weight")
FLOATS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
NAME = "model.layers.0.mlp.down_proj"


def quantization(weights: Any = FLOATS, activations: Any = None, **keys: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    form = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    return {**form, "config_groups": {"group_0": group}, **keys}


def number(bits: int) -> float:
    """Return an e2m1 number: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if sign else size


def pack(values: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the stored tensors of a matrix, and what they mean: a scale divided by the global scale, times a number."""
    global_scale = np.float32(448 * 6 / np.abs(values).max())
    blocks = values.reshape(len(values), -1, 16)
    scales = (np.abs(blocks).max(axis=2) / 6 * global_scale).astype(ml_dtypes.float8_e4m3fn)
    numbers = np.array([number(bits) for bits in range(16)], np.float32)
    steps = (scales.astype(np.float32) / global_scale)[:, :, None]
    bits = np.abs(blocks[..., None] / np.where(steps == 0, 1, steps)[..., None] - numbers).argmin(-1)
    flat = bits.reshape(len(values), -1).astype(np.uint8)
    stored = {"packed": flat[:, 0::2] + 16 * flat[:, 1::2], "scale": scales, "global_scale": global_scale.reshape(1)}
    return stored, (numbers[bits] * steps).reshape(values.shape)


def write_nvfp4(folder: Path, config: dict[str, Any], changes: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Write the tiny checkpoint in NVFP4, with other tensors where `changes` has one, and without those that are None; return
    its dequantised tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, tensors, dequantised = open_model(SOURCE), dict[str, Any](), dict[str, np.ndarray]()
    for name, info in whole.tensors.items():
        values = np.asarray(whole.read(name)).astype(np.float32)
        if len(info.shape) < 2 or name in PLAIN:
            tensors[name] = dequantised[name] = values
            continue
        stored, dequantised[name] = pack(values)
        tensors |= {f"{name}_{part}": array for part, array in stored.items()}
        tensors[name.replace(".weight", ".input_global_scale")] = np.full(1, 0.25, np.float32)
    kept = {name: array for name, array in (tensors | (changes or {})).items() if array is not None}
    write_safetensors(folder / "model.safetensors", kept)
    hf = {key: value for key, value in whole.config.items() if key != "quantization_config"}
    if config:
        hf["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(hf))
    return dequantised


@pytest.mark.parametrize("activations", [None, {**FLOATS, "dynamic": "local"}], ids=["w4a16", "w4a4"])
def test_weights_are_numbers_times_scales_over_the_global_scale(tmp_path: Path, activations: Any) -> None:
    expected = write_nvfp4(tmp_path, quantization(activations=activations))
    decoder = decoder_of(open_model(tmp_path))
    config = Config(model=ModelConfig(model=str(tmp_path)))
    (note,) = quantization_notes(config, decoder, Chip("cpu"))
    assert note.startswith("NVFP4 weights are dequantised as they are loaded")
    params = load(tmp_path, make_policy(config, decoder, Chip("cpu")))
    for name in (f"{NAME}.weight", "model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight"):
        np.testing.assert_array_equal(params[name], expected[name])


@pytest.mark.slow
def test_tokens_are_those_of_the_dequantised_checkpoint(tmp_path: Path) -> None:
    dequantised = write_nvfp4(tmp_path / "stored", quantization())
    folder = tmp_path / "wide"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", dequantised)
    hf = json.loads((tmp_path / "stored" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: hf[key] for key in hf if key != "quantization_config"}))
    prompt = golden_checkpoint("llama3_tiny").prompt_ids
    stored, wide = TinyModel(tmp_path / "stored"), TinyModel(folder)
    logits, expected = stored.logits(prompt), wide.logits(prompt)
    np.testing.assert_array_equal(logits, expected)
    assert stored.greedy(logits[-1], 16) == wide.greedy(expected[-1], 16)


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
    write_nvfp4(tmp_path, quantization(), changes)
    with pytest.raises(CheckpointError, match=expected):
        open_model(tmp_path)


def test_a_global_scale_of_zero_is_rejected(tmp_path: Path) -> None:
    write_nvfp4(tmp_path, quantization(), {f"{NAME}.weight_global_scale": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match="weight_global_scale': expected a positive number, found 0"):
        open_model(tmp_path).read(f"{NAME}.weight")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (quantization({**FLOATS, "group_size": 32}), ".weights.group_size is 32; supported: 16"),
        (quantization({**FLOATS, "symmetric": False}), ".config_groups.group_0.weights is"),
        (quantization(activations={"num_bits": 8, "type": "int"}), ".input_activations is"),
        (quantization(transform_config={"R1": 1}), ".transform_config is {'R1': 1}; supported: none"),
    ],
    ids=["group size", "zeros", "activations", "rotations"],
)
def test_other_kinds_are_rejected(found: dict[str, Any], expected: str) -> None:
    hf = json.loads((SOURCE / "config.json").read_text()) | {"quantization_config": found}
    with pytest.raises(CheckpointError) as caught:
        decoder_config(hf)
    assert expected in str(caught.value)
