"""A.X-K1 as published: a norm that dense layers do not read, and routers without correction biases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint.safetensors_file import open_safetensors
from jaxserve.errors import CheckpointError
from jaxserve.layers.policy import plain
from jaxserve.models.registry import decoder_config, decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.weights.loader import check_tensors
from tests.models.goldens import golden_checkpoint
from tests.unit.checkpoint.checkpoint_files import write_safetensors

GOLDEN = golden_checkpoint("axk1_tiny").path
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_published_checkpoints_have_a_norm_too_many_and_no_correction_biases(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    stored = open_safetensors(GOLDEN / "model.safetensors")
    tensors = {name: np.array(stored.read(name)) for name in stored.tensors if name != BIAS}
    tensors["model.layers.0.post_mlp_layernorm.weight"] = np.ones(48, np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found, whole = open_model(tmp_path), open_model(GOLDEN)
    assert found.tensors.keys() == whole.tensors.keys()
    check_tensors(found, make_skeleton(decoder_of(found), plain(jnp.dtype("float32"))))
    assert found.read(BIAS).tolist() == [0.0] * 6
    assert np.abs(whole.read(BIAS)).min() > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is null; supported: an integer"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (
            {"topk_method": "group_limited_greedy"},
            "topk_method is 'group_limited_greedy'; supported: 'noaux_tc' or null",
        ),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"n_group": 1, "topk_group": 1, "topk_method": "greedy"}, None),
    ],
)
def test_what_is_not_computed_is_refused_with_its_key(keys: dict[str, Any], message: str | None) -> None:
    config = {**json.loads((GOLDEN / "config.json").read_text()), **keys}
    if message is None:
        assert decoder_config(config).layers[1].norm_placement == "sandwich_mlp"
        return
    with pytest.raises(CheckpointError, match=message):
        decoder_config(config)
