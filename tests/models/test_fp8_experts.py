"""Experts that a checkpoint stores together in fp8: with one scale for each, as Mistral Small 4, and in blocks, as Step 3.5 Flash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import open_model
from tests.models.goldens import golden_checkpoint
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors

BLOCK: Final = (10, 32)
"""Outputs and inputs of a block; neither divides all matrices."""
PLAIN: Final = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", ".g_proj.weight")


def in_fp8(name: str, tensor: np.ndarray, block: tuple[int, int] | None) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return what a checkpoint stores of a matrix, or of those of all experts, and the weights that it means."""
    *experts, num_outputs, num_inputs = tensor.shape
    height, width = block or (num_outputs, num_inputs)
    grid = -(-num_outputs // height), -(-num_inputs // width)
    scales = np.zeros((*experts, *grid), np.float32)
    for row, column in np.ndindex(grid):
        part = tensor[..., row * height : (row + 1) * height, column * width : (column + 1) * width]
        scales[..., row, column] = np.abs(part).max((-1, -2)) / 448
    factors = scales.repeat(height, -2)[..., :num_outputs, :].repeat(width, -1)[..., :num_inputs]
    values = (tensor / factors).astype(ml_dtypes.float8_e4m3fn)
    stored = {name: values, f"{name}_scale_inv": scales if experts or block else scales.reshape(())}
    if block is None:
        unused = f"{name}_activation_scale" if experts else name.replace(".weight", ".activation_scale")
        stored[unused] = np.full(experts, 0.25, np.float32)
    return stored, values.astype(np.float32) * factors


def write(folder: Path, name: str, block: tuple[int, int] | None) -> Path:
    """Write a checkpoint as it is published in `folder`, and a plain one with the same weights in `folder`/plain."""
    source, stored, meant = golden_checkpoint(name).path, dict[str, np.ndarray](), dict[str, np.ndarray]()
    for key, tensor in load_file(source / "model.safetensors").items():
        if tensor.ndim == 1 or key.endswith(PLAIN):
            stored[key] = meant[key] = tensor
        else:
            own, meant[key] = in_fp8(key, tensor.astype(np.float32), block)
            stored |= own
    config = json.loads((source / "config.json").read_text())
    scheme = "dynamic" if block else "static"
    method = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block and [*block]}
    for path, tensors, keys in (
        (folder, stored, config | {"quantization_config": method}),
        (folder / "plain", meant, config),
    ):
        path.mkdir(exist_ok=True)
        write_safetensors(path / "model.safetensors", tensors)
        (path / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.mark.slow
def test_blocks_keep_the_stored_values(tmp_path: Path) -> None:
    path, prompt = write(tmp_path, "step3p5_tiny", BLOCK), golden_checkpoint("step3p5_tiny").prompt_ids
    kept, plain = TinyModel(path), TinyModel(path / "plain")
    assert kept.policy.quant.name == "fp8-block-weight-only"
    np.testing.assert_allclose(kept.logits(prompt), plain.logits(prompt), atol=2e-5, rtol=0)


@pytest.mark.slow
def test_one_scale_for_each_expert_is_read(tmp_path: Path) -> None:
    path, prompt = write(tmp_path, "mistral4_tiny", None), golden_checkpoint("mistral4_tiny").prompt_ids
    dequantised, plain = TinyModel(path, quantization="none"), TinyModel(path / "plain")
    np.testing.assert_allclose(dequantised.logits(prompt), plain.logits(prompt), atol=2e-5, rtol=0)


def test_scales_that_belong_to_nothing_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path, "mistral4_tiny", None)
    stored = open_safetensors(path / "model.safetensors")
    tensors = {key: np.array(stored.read(key)) for key in stored.tensors}
    name = "model.layers.1.mlp.experts.down_proj_scale_inv"
    write_safetensors(path / "model.safetensors", tensors | {name: np.ones((6, 3, 1), np.float32)})
    with pytest.raises(CheckpointError, match=rf"{name}'.*\(6, 48, 16\).*found shape \(6, 3, 1\)"):
        open_model(path)
