"""A tiny checkpoint with its matrices in NVFP4, as either exporter writes it, and the weights that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxserve.models.registry import open_model
from tests.unit.checkpoint.checkpoint_files import write_safetensors

Exporter = Literal["compressed-tensors", "modelopt"]
FLOATS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
PLAIN = ("lm_head.weight", "model.embed_tokens.weight")


def quantization(weights: Any = FLOATS, activations: Any = None, **keys: Any) -> dict[str, Any]:
    """Return `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    form = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    return {**form, "config_groups": {"group_0": group}, **keys}


def number(bits: int) -> float:
    """Return an e2m1 number: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if sign else size


def pack(name: str, values: np.ndarray, exporter: Exporter) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the stored tensors of a matrix, and what they mean: a scale, times or over that of the matrix, times a number."""
    global_scale = np.float32(448 * 6 / np.abs(values).max())
    factor = np.float32(np.abs(values).max() / (448 * 6))
    blocks = values.reshape(len(values), -1, 16)
    scales = (np.abs(blocks).max(axis=2) / 6 * global_scale).astype(ml_dtypes.float8_e4m3fn)
    numbers = np.array([number(bits) for bits in range(16)], np.float32)
    wide = scales.astype(np.float32)
    steps = (wide / global_scale if exporter == "compressed-tensors" else wide * factor)[:, :, None]
    bits = np.abs(blocks[..., None] / np.where(steps == 0, 1, steps)[..., None] - numbers).argmin(-1)
    flat = bits.reshape(len(values), -1).astype(np.uint8)
    packed, meant = flat[:, 0::2] + 16 * flat[:, 1::2], (numbers[bits] * steps).reshape(values.shape)
    module = name.removesuffix(".weight")
    if exporter == "modelopt":
        stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor.reshape(())}
        return {f"{module}.{part}": array for part, array in (stored | {"input_scale": factor}).items()}, meant
    stored = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": global_scale.reshape(1)}
    return {
        f"{module}.{part}": array for part, array in (stored | {"input_global_scale": np.ones(1, np.float32)}).items()
    }, meant


def write_nvfp4(
    folder: Path,
    source: Path,
    config: dict[str, Any],
    changes: dict[str, Any] | None = None,
    exporter: Exporter = "compressed-tensors",
) -> dict[str, np.ndarray]:
    """Write the checkpoint at `source` in NVFP4, with other tensors where `changes` has one, and without those that are None;
    return its dequantised tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, tensors, dequantised = open_model(source), dict[str, Any](), dict[str, np.ndarray]()
    for name, info in whole.tensors.items():
        values = np.asarray(whole.read(name)).astype(np.float32)
        if len(info.shape) < 2 or name in PLAIN or name.endswith("mlp.gate.weight"):
            tensors[name] = dequantised[name] = values
            continue
        stored, dequantised[name] = pack(name, values, exporter)
        tensors |= stored
    kept = {name: array for name, array in (tensors | (changes or {})).items() if array is not None}
    write_safetensors(folder / "model.safetensors", kept)
    hf = {key: value for key, value in whole.config.items() if key != "quantization_config"}
    if config:
        hf["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(hf))
    return dequantised
