"""Models whose checkpoint has fp8 blocks: the logits and tokens of the dequantised model, on one device and on several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxserve.models.registry import decoder_of, open_model
from jaxserve.quant.policy import QuantPolicy
from jaxserve.sharding.rules import MeshShape
from tests.models.goldens import golden_checkpoint
from tests.models.mesh_model import MeshModel
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.fp8_files import in_blocks, write_fp8

pytestmark = pytest.mark.slow
BLOCK = {
    "qwen3_tiny": (40, 32),
    "qwen3_moe_tiny": (40, 32),
    "deepseek_v3_tiny": (24, 16),
    "deepseek_v32_tiny": (24, 16),
}
"""Outputs and inputs of a block; heads, experts and latent vectors end within some."""


def written(folder: Path, name: str) -> Path:
    write_fp8(folder, golden_checkpoint(name).path, in_blocks(*BLOCK[name]))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_tiny", marks=pytest.mark.exhaustive),
        "qwen3_moe_tiny",
        "deepseek_v3_tiny",
        pytest.param("deepseek_v32_tiny", marks=pytest.mark.exhaustive),
    ],
)
def test_logits_and_tokens_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    path, prompt = written(tmp_path, name), golden_checkpoint(name).prompt_ids
    kept, dequantised = TinyModel(path), TinyModel(path, quantization="none")
    assert (kept.policy.quant.name, dequantised.policy.quant.name) == ("fp8-block-weight-only", "none")
    logits, expected = kept.logits(prompt), dequantised.logits(prompt)
    np.testing.assert_allclose(logits, expected, atol=2e-5, rtol=0)
    assert kept.greedy(logits[-1], 32) == dequantised.greedy(expected[-1], 32)


@pytest.mark.parametrize(
    ("name", "shape", "exchange", "fused_for"),
    [
        ("qwen3_tiny", MeshShape(2), "auto", 2),
        pytest.param("qwen3_moe_tiny", MeshShape(2), "auto", 2, marks=pytest.mark.exhaustive),
        ("qwen3_moe_tiny", MeshShape(2, expert=2), "all-to-all", 0),
    ],
    ids=str,
)
def test_devices_split_matrices_in_blocks(
    tmp_path: Path, name: str, shape: MeshShape, exchange: str, fused_for: int
) -> None:
    """Each expert's share of 16 inputs is half of a block; fused matrices have rows of blocks that end within them."""
    golden = replace(golden_checkpoint(name), path=written(tmp_path, name))
    expected = TinyModel(golden.path, quantization="none").logits(golden.prompt_ids)
    stored = decoder_of(open_model(golden.path)).stored
    assert stored is not None
    quant = QuantPolicy(stored.format, stored.group_size, plain_matrices=stored.plain_matrices, platform="cpu")
    model = MeshModel(golden, shape, exchange=exchange, fused_for=fused_for, quant=quant)
    assert any(str(array.dtype) == "float8_e4m3fn" for array in model.skeleton.arrays)
    for row in model.logits(golden.prompt_ids):
        np.testing.assert_allclose(row[-8:], expected, atol=1e-4, rtol=0)


def test_devices_split_latent_attention_in_blocks(tmp_path: Path) -> None:
    path, prompt = written(tmp_path, "deepseek_v3_tiny"), golden_checkpoint("deepseek_v3_tiny").prompt_ids
    shared, alone = TinyModel(path, tensor_parallel_size=2), TinyModel(path, quantization="none")
    assert shared.policy.quant.name == "fp8-block-weight-only"
    np.testing.assert_allclose(shared.logits(prompt), alone.logits(prompt), atol=1e-4, rtol=0)
