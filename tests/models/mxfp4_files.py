"""The tiny checkpoint of gpt-oss with experts in MXFP4, and the weights that they mean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxserve.models.registry import open_model
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors

SOURCE = golden_checkpoint("gpt_oss_tiny").path
EXPERTS, WIDTH, FFN = 4, 64, 32
FIRST = "model.layers.0.mlp.experts"


def number(bits: int) -> float:
    """Return an e2m1 number: a sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return -size if sign else size


def meant(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return (E, O, I), dequantised byte by byte."""
    wide = np.zeros((*scales.shape, 32), np.float32)
    for place in np.ndindex(blocks.shape):
        *block, byte = place
        factor = 2.0 ** (int(scales[tuple(block)]) - 127)
        wide[(*block, 2 * byte)] = number(int(blocks[place]) & 15) * factor
        wide[(*block, 2 * byte + 1)] = number(int(blocks[place]) >> 4) * factor
    return wide.reshape(*scales.shape[:2], -1)


def write_mxfp4(folder: Path, *, num_scales: int = WIDTH // 32) -> dict[str, np.ndarray]:
    """Write the tiny checkpoint with random blocks for its experts; return the weights of the first layer's."""
    folder.mkdir()
    stored = open_model(SOURCE).inner  # type: ignore[attr-defined]
    tensors = {name: np.asarray(stored.read(name)) for name in stored.tensors if not name.endswith("_proj")}
    random = np.random.default_rng(3)
    expected = {}
    for layer in range(2):
        for name, outputs, inputs in (("gate_up_proj", 2 * FFN, WIDTH), ("down_proj", WIDTH, FFN)):
            blocks = random.integers(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=np.uint8)
            scales = random.integers(117, 128, (EXPERTS, outputs, inputs // 32), dtype=np.uint8)
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales[:, :, :num_scales]}
            if layer == 0:
                expected[name] = meant(blocks, scales)
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((SOURCE / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return expected
