"""Checkpoints stored in int8 by compressed-tensors: values and scales are kept, and compute what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_config, decoder_of, open_model
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy
from tests.models.goldens import golden_checkpoint
from tests.models.loading import load
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors

SOURCE = golden_checkpoint("llama3_tiny").path
PLAIN = ("lm_head.weight", "model.embed_tokens.weight")
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {**TOKENS, "strategy": "tensor", "dynamic": False}


def quantization(strategy: str = "channel", activations: Any = TOKENS, **keys: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        **keys,
    }


def write_int8(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Write the tiny checkpoint in int8; return its dequantised tensors."""
    whole, tensors, dequantised = open_model(SOURCE), dict[str, np.ndarray](), dict[str, np.ndarray]()
    group = config["config_groups"]["group_0"]
    for name, info in whole.tensors.items():
        values = whole.read(name).astype(np.float32)
        if len(info.shape) < 2 or name in PLAIN:
            tensors[name] = dequantised[name] = values
            continue
        axis = 1 if group["weights"]["strategy"] == "channel" else None
        scale = (np.abs(values).max(axis=axis, keepdims=axis is not None) / 125).astype(ml_dtypes.bfloat16)
        wide = scale.astype(np.float32)
        tensors[name] = np.clip(np.rint(values / wide), -128, 127).astype(np.int8)
        tensors[f"{name}_scale"] = scale if axis == 1 else scale.reshape(1)
        dequantised[name] = tensors[name].astype(np.float32) * wide
        if group["input_activations"] == STATIC:
            tensors[name.replace(".weight", ".input_scale")] = np.full(1, 0.25, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**whole.config, "quantization_config": config}))
    return dequantised


@pytest.mark.parametrize(
    ("strategy", "activations", "chosen"),
    [("channel", TOKENS, "int8"), ("tensor", STATIC, "int8"), ("channel", None, "int8-weight-only")],
    ids=["channels", "static", "weights alone"],
)
def test_stored_values_and_scales_are_kept(tmp_path: Path, strategy: str, activations: Any, chosen: str) -> None:
    dequantised = write_int8(tmp_path, quantization(strategy, activations))
    config = Config(model=ModelConfig(model=str(tmp_path)))
    policy = make_policy(config, decoder_of(open_model(tmp_path)), Chip("cpu"))
    assert policy.quant.name == chosen
    params = load(tmp_path, policy)
    for tensor, expected in dequantised.items():
        found = params[tensor]
        if found.ndim == 2 and tensor not in PLAIN:
            assert found.dtype == np.int8
            found = found.astype(np.float32) * params[f"{tensor}_scale"][:, None]
        np.testing.assert_array_equal(found, expected, err_msg=tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("activations", "tolerance"), [(None, 1e-4), (TOKENS, 0.5)], ids=["weights alone", "W8A8"])
def test_a_model_computes_what_its_dequantised_weights_compute(
    tmp_path: Path, activations: Any, tolerance: float
) -> None:
    """With activations in 8 bits the rounding of these is the difference."""
    golden = golden_checkpoint("llama3_tiny")
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    stored.mkdir()
    plain.mkdir()
    write_safetensors(plain / "model.safetensors", write_int8(stored, quantization(activations=activations)))
    (plain / "config.json").write_text((SOURCE / "config.json").read_text())
    expected, found = (log_softmax(TinyModel(folder).logits(golden.prompt_ids)[-1]) for folder in (plain, stored))
    best = np.argsort(expected)[-20:]
    assert np.abs(expected - found)[best].max() < tolerance
    assert activations is None or np.abs(expected - found).max() > 1e-4, "activations were not rounded"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (quantization(format="marlin-24"), ".format is 'marlin-24'; supported: int-quantized for 8-bit integers"),
        (quantization("group"), ".weights.strategy is 'group'; supported: tensor and channel"),
        (quantization(activations={**TOKENS, "symmetric": False}), ".input_activations is"),
        (quantization(activations={"num_bits": 8, "type": "float"}), "symmetric 8-bit integers or none"),
        (quantization(transform_config={"R1": 1}), ".transform_config is {'R1': 1}; supported: none"),
    ],
    ids=["format", "group", "zeros", "floats", "rotations"],
)
def test_other_forms_are_rejected_in_one_line(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        decoder_config({**json.loads((SOURCE / "config.json").read_text()), "quantization_config": config})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scale_that_is_missing_or_misshaped_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write_int8(tmp_path, quantization())
    whole = open_model(SOURCE)
    for scale, expected in ((None, "expected its weight_scale, found none"), (np.ones(3, np.float32), "shape (3,)")):
        tensors = {key: whole.read(key) for key in whole.tensors} | {name: np.zeros((96, 64), np.int8)}
        scales = {} if scale is None else {f"{name}_scale": scale}
        write_safetensors(tmp_path / "model.safetensors", tensors | scales)
        with pytest.raises(CheckpointError) as caught:
            open_model(tmp_path)
        assert name in str(caught.value) and expected in str(caught.value)
