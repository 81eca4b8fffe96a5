"""Rope scaling of GGUF files: Llama 3's formula is recognised from its factors, and scaling keys are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.registry import open_model
from tests.unit.checkpoint.checkpoint_files import HEAD_DIM, write_decoder


def config_of(path: Path) -> dict[str, Any]:
    return open_model(path).config


def rejection(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(path)
    return str(caught.value).removeprefix(f"{path}: ")


def llama3_factors(head_dim: int, theta: float, factor: float) -> list[float]:
    """Return inv_freq / scaled inv_freq of transformers' rope_type llama3 with low 1, high 4, original 8192."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 500_000.0), (32.0, 500_000.0), (8.0, 10_000.0)])
def test_llama3_rope_scaling_is_recognised_in_the_factors(tmp_path: Path, factor: float, theta: float) -> None:
    factors = np.array(llama3_factors(HEAD_DIM, theta, factor), np.float32)
    changes: dict[str, Any] = {"rope__freq_base": theta}
    config = config_of(write_decoder(tmp_path / "a.gguf", "llama", {"rope_freqs.weight": factors}, **changes))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_rope_scaling_of_llama_4_is_recognised_in_its_factors(tmp_path: Path) -> None:
    """Its formula has no smooth part, in which Llama 3's has the third frequency here: low and high are both 1."""
    wavelengths = [2 * math.pi * 500_000.0 ** (index / HEAD_DIM) for index in range(0, HEAD_DIM, 2)]
    factors = np.array([16.0 if wavelength > 8192 else 1.0 for wavelength in wavelengths], np.float32)
    changes: dict[str, Any] = {"rope__freq_base": 500_000.0, "rope__dimension_count": HEAD_DIM}
    changes |= {
        "expert_count": 4,
        "expert_used_count": 1,
        "expert_feed_forward_length": 8,
        "interleave_moe_layer_step": 1,
    }
    config = config_of(write_decoder(tmp_path / "a.gguf", "llama4", {"rope_freqs.weight": factors}, **changes))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    ones = np.ones(HEAD_DIM // 2, np.float32)
    assert "rope_scaling" not in config_of(write_decoder(tmp_path / "a.gguf", "llama", {"rope_freqs.weight": ones}))


@pytest.mark.parametrize(
    ("factors", "found"),
    [
        ([1.0, 1.0, 2.0, 7.0], "expected the factors of Llama 3"),
        ([1.0, 2.0, 3.0, 4.0], "expected the factors of Llama 3"),
        ([1.0, 1.0, 1.0, math.nan], "expected the factors of Llama 3"),
        ([1.0, 1.0, 1.0, 0.0], "expected the factors of Llama 3"),
        ([1.0, 1.0, 8.0], "expected shape (4,), found (3,)"),
    ],
)
def test_other_rope_factors_are_rejected(tmp_path: Path, factors: list[float], found: str) -> None:
    extra = {"rope_freqs.weight": np.array(factors, np.float32)}
    message = rejection(write_decoder(tmp_path / "a.gguf", "llama", extra, rope__freq_base=20_000.0))
    assert message.startswith("tensor 'rope_freqs.weight': ")
    assert found in message


@pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
def test_a_factor_without_a_type_is_linear(tmp_path: Path, key: str) -> None:
    own: dict[str, Any] = {key: 4.0}
    config = config_of(write_decoder(tmp_path / "a.gguf", "llama", **own))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    plain: tuple[dict[str, Any], ...] = ({key: 1.0}, {"rope__scaling__type": "none", key: 4.0})
    for index, each in enumerate(plain):
        assert "rope_scaling" not in config_of(write_decoder(tmp_path / f"{index}.gguf", "llama", **each))


def test_linear_and_yarn_scaling_are_kept(tmp_path: Path) -> None:
    linear: dict[str, Any] = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    config = config_of(write_decoder(tmp_path / "a.gguf", "llama", **linear))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
        "rope__scaling__yarn_beta_fast": 16.0,
    }
    config = config_of(write_decoder(tmp_path / "b.gguf", "qwen2", **yarn))
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
    }
    message = rejection(write_decoder(tmp_path / "c.gguf", "qwen2", **yarn, rope__scaling__attn_factor=0.5))
    assert message == "key 'qwen2.rope.scaling.attn_factor': expected 1 or none, found 0.5"
