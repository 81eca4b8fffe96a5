"""gpt-oss as published: experts in MXFP4, dequantised as the format defines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy, quantization_notes
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
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


def loaded(folder: Path, quantization: str) -> dict[str, np.ndarray]:
    decoder = decoder_of(open_model(folder))
    config = Config(model=ModelConfig(model=str(folder), quantization=quantization))
    assert any("MXFP4" in note for note in quantization_notes(config, decoder, Chip("cpu"))) == (quantization == "auto")
    return load(folder, make_policy(config, decoder, Chip("cpu")))


def test_experts_in_mxfp4_are_dequantised(tmp_path: Path) -> None:
    expected = write_mxfp4(tmp_path / "a")
    params = loaded(tmp_path / "a", "auto")
    np.testing.assert_array_equal(params[f"{FIRST}.gate_proj.weight"], expected["gate_up_proj"][:, 0::2])
    np.testing.assert_array_equal(params[f"{FIRST}.up_proj.weight"], expected["gate_up_proj"][:, 1::2])
    np.testing.assert_array_equal(params[f"{FIRST}.down_proj.weight"], expected["down_proj"])


def test_experts_in_mxfp4_can_be_quantised_to_int4(tmp_path: Path) -> None:
    expected = write_mxfp4(tmp_path / "a")["down_proj"]
    params = loaded(tmp_path / "a", "int4-weight-only")
    weight, scales = (params[f"{FIRST}.down_proj.weight{end}"].astype(np.float32) for end in ("", "_scale"))
    groups = expected.reshape(EXPERTS, WIDTH, scales.shape[1], -1)
    found = weight.reshape(groups.shape) * scales.swapaxes(1, 2)[..., None]
    assert np.abs(found - groups).max() <= np.abs(groups).max() / 8 + 1e-3


def test_scales_of_another_shape_are_rejected(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "a", num_scales=1)
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks': expected blocks of 16 bytes .*\(4, 64, 1\)"):
        open_model(tmp_path / "a")
