"""gpt-oss as published: experts in MXFP4, served in their blocks, and dequantised as the format defines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jaxserve_kernels.native import float4
from safetensors.numpy import load_file

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy
from jaxserve.sharding.rules import MeshShape
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.models.mesh_model import MeshModel
from tests.models.mxfp4_files import EXPERTS, FIRST, WIDTH, write_mxfp4
from tests.models.tiny_model import TinyModel


def loaded(folder: Path, quantization: str) -> dict[str, np.ndarray]:
    decoder = decoder_of(open_model(folder))
    config = Config(model=ModelConfig(model=str(folder), quantization=quantization))
    return load(folder, make_policy(config, decoder, Chip("cpu")))


def test_experts_keep_the_stored_bits(tmp_path: Path) -> None:
    """Two numbers are in a byte on CPUs, in the order of the file; blocks come before outputs."""
    write_mxfp4(tmp_path / "a")
    params, stored = loaded(tmp_path / "a", "auto"), load_file(tmp_path / "a" / "model.safetensors")
    for name, rows in (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2)), ("down_proj", slice(None))):
        source = name if name == "down_proj" else "gate_up_proj"
        blocks, scales = (stored[f"{FIRST}.{source}_{end}"][:, rows] for end in ("blocks", "scales"))
        weight, exponents = params[f"{FIRST}.{name}.weight"], params[f"{FIRST}.{name}.weight_scale"]
        assert weight.dtype == exponents.dtype == np.uint8
        np.testing.assert_array_equal(weight, blocks.reshape(*blocks.shape[:2], -1))
        np.testing.assert_array_equal(exponents, scales.swapaxes(1, 2))
    assert params["model.layers.0.self_attn.q_proj.weight"].dtype == np.float32, "the checkpoint quantises experts only"
    assert "model.layers.0.self_attn.q_proj.weight_scale" not in params


def test_experts_in_mxfp4_can_be_dequantised(tmp_path: Path) -> None:
    expected = write_mxfp4(tmp_path / "a")
    params = loaded(tmp_path / "a", "none")
    np.testing.assert_array_equal(params[f"{FIRST}.gate_proj.weight"], expected["gate_up_proj"][:, 0::2])
    np.testing.assert_array_equal(params[f"{FIRST}.up_proj.weight"], expected["gate_up_proj"][:, 1::2])
    np.testing.assert_array_equal(params[f"{FIRST}.down_proj.weight"], expected["down_proj"])


@pytest.mark.slow
def test_logits_and_tokens_are_those_of_dequantised_experts(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "a")
    kept, dequantised = TinyModel(tmp_path / "a"), TinyModel(tmp_path / "a", quantization="none")
    assert (kept.policy.quant.name, dequantised.policy.quant.name) == ("mxfp4-weight-only", "none")
    prompt = golden_checkpoint("gpt_oss_tiny").prompt_ids
    logits, expected = kept.logits(prompt), dequantised.logits(prompt)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)
    assert kept.greedy(logits[-1], 32) == dequantised.greedy(expected[-1], 32)


@pytest.mark.skipif(not float4.is_built(), reason="needs the native kernels")
def test_native_kernels_give_the_bits_of_dequantised_experts(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "a")
    kept, dequantised = (
        TinyModel(tmp_path / "a", cpu_kernels="vector", quantization=name) for name in ("auto", "none")
    )
    assert kept.policy.is_native
    prompt = golden_checkpoint("gpt_oss_tiny").prompt_ids
    np.testing.assert_array_equal(kept.logits(prompt), dequantised.logits(prompt))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "exchange", "fused_for"),
    [pytest.param(MeshShape(4), "auto", 4, marks=pytest.mark.exhaustive), (MeshShape(4, expert=4), "all-to-all", 0)],
    ids=str,
)
def test_devices_split_experts_in_mxfp4(tmp_path: Path, shape: MeshShape, exchange: str, fused_for: int) -> None:
    """Four devices have 8 inputs of each block of the down projection: parts of a block with its scale."""
    write_mxfp4(tmp_path / "a")
    golden = replace(golden_checkpoint("gpt_oss_tiny"), path=tmp_path / "a")
    expected = TinyModel(tmp_path / "a", quantization="none").logits(golden.prompt_ids)
    quant = QuantPolicy("mxfp4-weight-only", platform="cpu")
    model = MeshModel(golden, shape, exchange=exchange, fused_for=fused_for, quant=quant)
    for row in model.logits(golden.prompt_ids):
        np.testing.assert_allclose(row[-8:], expected, atol=1e-4, rtol=0)


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
