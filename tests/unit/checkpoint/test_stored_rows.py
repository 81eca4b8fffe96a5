"""Matrices that GPT-2 and families of its time store together, transposed, or beside causal masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.checkpoint.qkv import QKVRows, num_rows
from jaxserve.models.registry import open_model
from tests.models.goldens import DATA
from tests.unit.checkpoint.checkpoint_files import write_safetensors

HEADS, DIM = 4, 12


def rows_of(order: QKVRows, num_kv_heads: int) -> dict[str, list[int]]:
    parts = order.parts(HEADS * DIM, num_kv_heads * DIM, num_kv_heads)
    total = np.arange(num_rows(parts))
    return {name: total[rows].tolist() for name, rows in parts.items()}


def test_parts_follow_one_another() -> None:
    found = rows_of(QKVRows(), 2)
    assert found == {"q_proj": list(range(48)), "k_proj": list(range(48, 72)), "v_proj": list(range(72, 96))}


def test_a_group_for_each_kv_head_has_its_queries_then_key_and_value() -> None:
    found = rows_of(QKVRows("kv_heads"), 2)
    assert found["q_proj"] == [*range(24), *range(48, 72)]
    assert found["k_proj"] == [*range(24, 36), *range(72, 84)]
    assert found["v_proj"] == [*range(36, 48), *range(84, 96)]


def test_one_kv_head_has_one_group() -> None:
    assert rows_of(QKVRows("kv_heads"), 1) == rows_of(QKVRows(), 1)


def test_groups_may_have_values_before_keys() -> None:
    found = rows_of(QKVRows(4, ("q_proj", "v_proj", "k_proj")), 4)
    assert found["q_proj"][:13] == [*range(12), 36]
    assert found["v_proj"][:13] == [*range(12, 24), 48]
    assert found["k_proj"][:13] == [*range(24, 36), 60]


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt_2_is_read_with_and_without_a_prefix_and_masks(tmp_path: Path, prefix: str) -> None:
    source = DATA / "gpt2_tiny"
    stored = load_file(source / "model.safetensors")
    tensors = {prefix + name.removeprefix("transformer."): value for name, value in stored.items()}
    tensors[f"{prefix}h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
    tensors[f"{prefix}h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    checkpoint = open_model(tmp_path)
    assert not any("attn.bias" in name or "masked" in name for name in checkpoint.tensors)
    fused = stored["transformer.h.0.attn.c_attn.weight"]
    key = checkpoint.read("model.layers.0.self_attn.k_proj.weight")
    np.testing.assert_array_equal(key, fused[:, 48:96].T)
    down = checkpoint.read("model.layers.0.mlp.down_proj.weight")
    np.testing.assert_array_equal(down, stored["transformer.h.0.mlp.c_proj.weight"].T)
