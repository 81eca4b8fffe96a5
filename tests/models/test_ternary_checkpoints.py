"""Checkpoints with BitNet's ternary weights: they are served as int8 with the same values, and compute what transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import decoder_config, decoder_of, open_model
from jaxserve.quant.tensor import as_floats
from jaxserve.runner.backend import Chip
from jaxserve.runner.limits import make_policy
from tests.models.goldens import DATA, golden_checkpoint
from tests.models.loading import load
from tests.models.tiny_model import TinyModel
from tests.unit.checkpoint.checkpoint_files import write_safetensors

GOLDEN = golden_checkpoint("bitnet_tiny")
PACKED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
DIVIDED = {"quant_method": "bitnet", "modules_to_not_convert": None}
ONLINE = {**PACKED, "quantization_mode": "online"}
FORMS = pytest.mark.parametrize("table", [PACKED, DIVIDED, ONLINE], ids=["packed", "divided", "online"])


def rounded(weights: np.ndarray) -> tuple[np.ndarray, np.float32]:
    scale = np.abs(weights).mean(dtype=np.float32)
    return np.clip(np.rint(weights * (1 / scale)), -1, 1).astype(np.int8), scale


def packed(values: np.ndarray) -> np.ndarray:
    """Return four outputs in a byte: those of the first quarter in its lowest bits."""
    quarters = (values + 1).astype(np.uint8).reshape(4, -1, values.shape[1])
    together: np.ndarray = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    return together


def write_ternary(folder: Path, table: dict[str, Any]) -> dict[str, np.ndarray]:
    """Write the tiny checkpoint with this `quantization_config`; return its ternary matrices as floats."""
    whole, tensors, ternary = open_model(GOLDEN.path), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, info in whole.tensors.items():
        weights = tensors[name] = as_floats(whole.read(name)).astype(np.float32)
        if len(info.shape) < 2 or "embed_tokens" in name:
            continue
        values, scale = rounded(weights)
        ternary[name] = values * scale
        if table.get("quantization_mode") != "online":
            tensors[name] = packed(values)
            tensors[f"{name}_scale"] = np.reshape(1 / scale if table == DIVIDED else scale, 1)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**whole.config, "quantization_config": table}))
    return ternary


@FORMS
def test_ternary_weights_are_served_as_int8_with_the_same_values(tmp_path: Path, table: dict[str, Any]) -> None:
    ternary = write_ternary(tmp_path, table)
    policy = make_policy(Config(model=ModelConfig(model=str(tmp_path))), decoder_of(open_model(tmp_path)), Chip("cpu"))
    assert policy.quant.name == "int8"
    params = load(tmp_path, policy)
    for tensor, expected in ternary.items():
        assert params[tensor].dtype == np.int8
        found = params[tensor].astype(np.float32) * params[f"{tensor}_scale"][:, None]
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=tensor)


@FORMS
@pytest.mark.slow
def test_logits_are_those_of_transformers(tmp_path: Path, table: dict[str, Any]) -> None:
    """Later positions see one whose activation lies between two integers, which a last bit decides."""
    write_ternary(tmp_path, table)
    expected = np.load(DATA / "ternary.npz")["logits"]
    found = TinyModel(tmp_path).logits(GOLDEN.prompt_ids)[-len(expected) :]
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.1)
    assert np.abs(found - GOLDEN.logits).max() > 1, "the weights were not rounded"


def test_modules_that_are_not_converted_stay_as_they_are(tmp_path: Path) -> None:
    write_ternary(tmp_path, {**ONLINE, "modules_to_not_convert": ["model.layers.0", "down_proj"]})
    plain = decoder_of(open_model(tmp_path)).stored
    assert plain is not None
    assert "model.layers.0.self_attn.q_proj" in plain.plain_matrices
    assert "model.layers.1.mlp.down_proj" in plain.plain_matrices
    assert "model.layers.1.mlp.up_proj" not in plain.plain_matrices


def test_a_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write_ternary(tmp_path, PACKED)
    whole = open_model(GOLDEN.path)
    write_safetensors(tmp_path / "model.safetensors", {name: np.zeros((14, 64), np.uint8)})
    (tmp_path / "config.json").write_text(json.dumps({**whole.config, "quantization_config": PACKED}))
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight.*: expected its weight_scale, found none"):
        open_model(tmp_path)


def test_ternary_weights_that_are_not_packed_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    write_ternary(tmp_path, PACKED)
    stored = {name: np.zeros((56, 64), np.float32), f"{name}_scale": np.ones((1,), np.float32)}
    write_safetensors(tmp_path / "model.safetensors", stored)
    with pytest.raises(
        CheckpointError, match=r"mlp\.up_proj\.weight.*: expected ternary weights packed four to a byte, found F32"
    ):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"linear_class": "bit"}, ".linear_class is 'bit'; supported: bitlinear and autobitlinear"),
        ({"quantization_mode": "late"}, ".quantization_mode is 'late'; supported: offline and online"),
        ({"use_rms_norm": True}, ".use_rms_norm is True; supported: false"),
        ({"modules_to_not_convert": "lm_head"}, ".modules_to_not_convert is 'lm_head'; supported: a list"),
    ],
)
def test_other_forms_are_rejected_in_one_line(changes: dict[str, Any], expected: str) -> None:
    hf = json.loads((GOLDEN.path / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        decoder_config({**hf, "quantization_config": {**PACKED, **changes}})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
