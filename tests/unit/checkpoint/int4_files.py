"""Checkpoints in 4 bits as exporters write them, made from float ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.checkpoint.safetensors_file import open_safetensors
from tests.unit.checkpoint.checkpoint_files import write_safetensors
from tests.unit.checkpoint.fp8_files import WHOLE


@dataclass(frozen=True)
class Layout:
    """One kind of checkpoint. group: inputs of a group; None: all. is_ordered: groups are not of neighbours."""

    config: Mapping[str, Any]
    group: int | None
    has_zeros: bool
    is_ordered: bool = False


def _compressed(*, symmetric: bool, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": symmetric, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
_GROUP = {"strategy": "group", "group_size": 32}
LAYOUTS = {
    "packed": Layout(_compressed(symmetric=True, **_GROUP), 32, False),
    "packed channels": Layout(_compressed(symmetric=True, strategy="channel", group_size=None), None, False),
    "packed zeros": Layout(_compressed(symmetric=False, actorder="weight", **_GROUP), 32, True),
    "packed order": Layout(_compressed(symmetric=True, actorder="group", **_GROUP), 32, False, is_ordered=True),
    "gptq": Layout(_GPTQ, 32, False),
    "gptq zeros": Layout({**_GPTQ, "sym": False}, 32, True),
    "gptq v2": Layout({**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}, 32, True),
    "gptq order": Layout({**_GPTQ, "sym": False, "desc_act": True}, 32, True, is_ordered=True),
    "awq": Layout(_AWQ, 32, True),
}


def write_int4(folder: Path, source: Path, layout: Layout, only: str = "") -> dict[str, np.ndarray]:
    """Write the checkpoint at `source` in 4 bits; return its dequantised tensors in float32. only: part of the names of quantised matrices."""
    whole, random = open_safetensors(source / "model.safetensors"), np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    dequantised: dict[str, np.ndarray] = {}
    for name, info in whole.tensors.items():
        values = whole.read(name).astype(np.float32)
        if len(info.shape) < 2 or name in WHOLE or only not in name:
            tensors[name] = dequantised[name] = values
            continue
        matrix = _quantized(values, layout, random)
        numbers = (matrix.numbers - matrix.zeros[matrix.groups].T).astype(np.float32)
        dequantised[name] = numbers * matrix.scales[matrix.groups].T.astype(np.float32)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{key}": array for key, array in _stored(matrix, layout).items()}
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    return dequantised


@dataclass(frozen=True)
class _Matrix:
    numbers: np.ndarray
    """[O, I], 0 to 15"""
    scales: np.ndarray
    """[G, O]"""
    zeros: np.ndarray
    groups: np.ndarray
    """Group of each input."""


def _quantized(values: np.ndarray, layout: Layout, random: np.random.Generator) -> _Matrix:
    num_inputs = values.shape[1]
    size = layout.group or num_inputs
    groups = np.arange(num_inputs) // size
    if layout.is_ordered:
        groups = random.permutation(groups)
    kind = np.float16 if layout.config["quant_method"] != "compressed-tensors" else ml_dtypes.bfloat16
    scales, zeros = [], []
    for group in range(num_inputs // size):
        part = values[:, groups == group]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        step = ((high - low) / 15 if layout.has_zeros else np.maximum(-low, high) / 7).astype(kind)
        scales.append(step)
        zero = np.clip(np.rint(-low / step.astype(np.float32)), 1, 15) if layout.has_zeros else np.full(len(part), 8)
        zeros.append(zero.astype(np.int64))
    scale, zero = np.array(scales), np.array(zeros)
    numbers = np.clip(np.rint(values / scale[groups].T.astype(np.float32)) + zero[groups].T, 0, 15).astype(np.int64)
    return _Matrix(numbers, scale, zero, groups.astype(np.int32))


def _stored(matrix: _Matrix, layout: Layout) -> dict[str, np.ndarray]:
    """Return the tensors of one module."""
    method = layout.config["quant_method"]
    if method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        packed = _packed(_shuffled(matrix.numbers.T, order))
        return {"qweight": packed, "qzeros": _packed(_shuffled(matrix.zeros, order)), "scales": matrix.scales}
    if method == "gptq":
        less = 0 if layout.config.get("checkpoint_format") == "gptq_v2" else 1
        return {
            "qweight": np.ascontiguousarray(_packed(matrix.numbers).T),
            "qzeros": _packed(matrix.zeros - less),
            "scales": matrix.scales,
            "g_idx": matrix.groups,
            "bias": np.zeros(len(matrix.numbers), np.float16),
        }
    tensors = {
        "weight_packed": _packed(matrix.numbers),
        "weight_scale": np.ascontiguousarray(matrix.scales.T),
        "weight_shape": np.array(matrix.numbers.shape, np.int32),
    }
    if layout.has_zeros:
        tensors["weight_zero_point"] = np.ascontiguousarray(_packed(matrix.zeros).T)
    if layout.is_ordered:
        tensors["weight_g_idx"] = matrix.groups
    return tensors


def _shuffled(numbers: np.ndarray, order: list[int]) -> np.ndarray:
    """Reorder every eight numbers."""
    return numbers.reshape(len(numbers), -1, 8)[:, :, order].reshape(numbers.shape)


def _packed(numbers: np.ndarray) -> np.ndarray:
    """Return int32 [X, Y / 8] of [X, Y], the first of eight in the lowest bits."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for place in range(8):
        words |= numbers[:, place::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)
