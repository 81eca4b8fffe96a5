"""Tiny checkpoints stored in fp8 as published ones are, made from a float one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.models.registry import open_model
from tests.unit.checkpoint.checkpoint_files import write_safetensors

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
WHOLE = ("lm_head.weight", "model.embed_tokens.weight")
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}


def _compressed(strategy: str, activations: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**_EIGHT_BITS, "strategy": strategy, "dynamic": False, **weights},
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the scales of one kind of checkpoint."""

    config: Mapping[str, Any]
    suffix: str
    scale_shape: str
    """Part of a matrix that shares a scale: "tensor", "row" or "block"."""
    block: tuple[int, int] = (40, 48)
    """Outputs and inputs of a block; neither divides all matrices."""
    has_input_scale: bool = False


def in_blocks(num_outputs: int, num_inputs: int) -> Layout:
    """Return the layout of DeepSeek-V3 and Qwen3-FP8 with blocks of another size than theirs."""
    block = [num_outputs, num_inputs]
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block, "fmt": "e4m3"}
    return Layout(config, "scale_inv", "block", (num_outputs, num_inputs))


_TOKENS = {**_EIGHT_BITS, "strategy": "token", "dynamic": True}
LAYOUTS = {
    "fp8": Layout({"quant_method": "fp8", "activation_scheme": "static"}, "scale", "tensor", has_input_scale=True),
    "fp8 blocks": in_blocks(40, 48),
    "channels": Layout(_compressed("channel", _TOKENS), "scale", "row"),
    "weights alone": Layout(_compressed("tensor", None), "scale", "tensor"),
    "blocks": Layout(_compressed("block", _TOKENS, block_structure=[40, 48]), "scale", "block"),
}


def write_fp8(folder: Path, source: Path, layout: Layout) -> dict[str, np.ndarray]:
    """Write the checkpoint at `source` in fp8; return its dequantised tensors in float32."""
    whole = open_model(source)
    tensors: dict[str, np.ndarray] = {}
    dequantised: dict[str, np.ndarray] = {}
    for name, info in whole.tensors.items():
        values = whole.read(name).astype(np.float32)
        if len(info.shape) < 2 or name in WHOLE:
            tensors[name] = dequantised[name] = values
            continue
        factors = _factors(np.abs(values), layout)
        stored = (values / factors.wide).astype(E4M3)
        tensors[name], dequantised[name] = stored, stored.astype(np.float32) * factors.wide
        tensors[f"{name}_{layout.suffix}"] = factors.stored
        if layout.has_input_scale:
            tensors[name.replace(".weight", ".input_scale")] = np.asarray(0.25, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**whole.config, "quantization_config": layout.config}))
    return dequantised


@dataclass(frozen=True)
class _Factors:
    stored: np.ndarray
    wide: np.ndarray
    """A factor for each element."""


def _factors(sizes: np.ndarray, layout: Layout) -> _Factors:
    if layout.scale_shape == "tensor":
        scale = np.asarray(sizes.max() / 448, np.float32)
        return _Factors(scale, np.broadcast_to(scale, sizes.shape))
    if layout.scale_shape == "row":
        rows = (sizes.max(axis=1, keepdims=True) / 448).astype(ml_dtypes.bfloat16).astype(np.float32) * 1.01
        return _Factors(rows, np.broadcast_to(rows, sizes.shape))
    height, width = layout.block
    starts = [np.arange(0, size, of) for size, of in zip(sizes.shape, layout.block, strict=True)]
    blocks = np.maximum.reduceat(np.maximum.reduceat(sizes, starts[0], axis=0), starts[1], axis=1) / np.float32(448)
    wide = blocks.repeat(height, axis=0)[: sizes.shape[0]].repeat(width, axis=1)[:, : sizes.shape[1]]
    return _Factors(blocks.astype(np.float32), wide)
