"""Adapters saved by PEFT are read, or rejected in one line."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.checkpoint.adapted import with_adapters
from jaxserve.checkpoint.peft import Adapter, open_adapter
from jaxserve.checkpoint.peft_modules import TargetExperts, TargetModel, is_exchanged
from jaxserve.checkpoint.qkv import QKVRows
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import open_model
from tests.models.goldens import DATA
from tests.unit.checkpoint.checkpoint_files import write_safetensors

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "target_modules": ["q_proj"]}
MODULE = "model.layers.0.self_attn.q_proj"
Q_PROJ = f"base_model.model.{MODULE}"


def matrices(module: str = Q_PROJ, *, rank: int = 2, rows: int = 64, columns: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    down = rng.standard_normal((rank, columns), np.float32)
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": rng.standard_normal((rows, rank), np.float32)}


def saved(
    folder: Path,
    tensors: dict[str, np.ndarray] | None = None,
    parts: dict[str, dict[str, int]] | None = None,
    target: TargetModel | None = None,
    **changes: Any,
) -> Adapter:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    write_safetensors(folder / "adapter_model.safetensors", matrices() if tensors is None else tensors)
    stacked = {name: _stacked(counts) for name, counts in (parts or {}).items()}
    return open_adapter("mine", folder, target or TargetModel(stacked))


def _stacked(counts: dict[str, int]) -> dict[str, slice | np.ndarray]:
    ends = itertools.accumulate(counts.values(), initial=0)
    return {name: slice(*bounds) for name, bounds in zip(counts, itertools.pairwise(ends), strict=True)}


def test_adapters_are_stacked_and_padded_with_zeros(tmp_path: Path) -> None:
    first = saved(tmp_path / "first")
    second = saved(tmp_path / "second", matrices(rank=3), r=3, lora_alpha=3)
    model = with_adapters(open_model(DATA / "llama3_tiny"), (first, second), 4)
    down, up = (model.read(f"{MODULE}.lora_{side}.weight") for side in "AB")
    expected_down, expected_up = np.zeros((8, 64), np.float32), np.zeros((64, 8), np.float32)
    for start, rank, scale in ((0, 2, 3.0), (4, 3, 1.0)):
        own_down, own_up = matrices(rank=rank).values()
        expected_down[start : start + rank], expected_up[:, start : start + rank] = own_down, own_up * scale
    np.testing.assert_array_equal(down, expected_down)
    np.testing.assert_allclose(up, expected_up, rtol=1e-6)
    np.testing.assert_array_equal(
        model.read(f"{MODULE}.weight"), open_model(DATA / "llama3_tiny").read(f"{MODULE}.weight")
    )


def test_an_adapter_in_memory_stays_as_it_was_opened(tmp_path: Path) -> None:
    saved(tmp_path)
    adapter = open_adapter("mine", tmp_path, TargetModel(), in_memory=True)
    addition = adapter.additions[MODULE]
    saved(tmp_path, matrices(rank=3), r=3)
    down, up = matrices().values()
    np.testing.assert_array_equal(addition.down.read(adapter.file), down)
    (tmp_path / "adapter_model.safetensors").unlink()
    np.testing.assert_array_equal(addition.up.read(adapter.file), up)


def test_a_place_without_an_adapter_has_matrices_of_zeros(tmp_path: Path) -> None:
    other = "model.layers.1.mlp.down_proj"
    model = with_adapters(open_model(DATA / "llama3_tiny"), (None, saved(tmp_path)), 4, [MODULE, other])
    down, up = (model.read(f"{MODULE}.lora_{side}.weight") for side in "AB")
    assert not down[:4].any() and down[4:6].any() and not up[:, :4].any() and up[:, 4:6].any()
    assert [model.read(f"{other}.lora_{side}.weight").shape for side in "AB"] == [(8, 96), (64, 8)]
    assert not model.read(f"{other}.lora_A.weight").any()


@pytest.mark.parametrize(("side", "value"), [("A", math.nan), ("B", math.inf), ("B", 3e38)])
def test_numbers_that_are_not_finite_are_rejected(tmp_path: Path, side: str, value: float) -> None:
    """The third one is finite only until it is multiplied with the scale."""
    tensors = matrices()
    tensors[f"{Q_PROJ}.lora_{side}.weight"][1, 1] = value
    model = with_adapters(open_model(DATA / "llama3_tiny"), (saved(tmp_path, tensors),), 4)
    with np.errstate(over="ignore"), pytest.raises(CheckpointError, match=f"adapter 'mine': {MODULE}: expected finite"):
        model.read(f"{MODULE}.lora_{side}.weight")


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 3.0),
        ({"use_rslora": True}, 6 / math.sqrt(2)),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 8}}, 4.0),
        ({"alpha_pattern": {r"layers\.[0-3]\..*": 8}}, 4.0),
        ({"alpha_pattern": {r"(?:.*\.)?(?:layers|blocks)\.\d+\.self_attn\.q_proj": 8}}, 4.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 8, "_proj": 9}}, 3.0),
    ],
)
def test_adapter_scales_equal_peft(tmp_path: Path, changes: dict[str, Any], scale: float) -> None:
    assert saved(tmp_path, **changes).additions[MODULE].scale == pytest.approx(scale)


def test_a_fused_module_of_an_adapter_is_split(tmp_path: Path) -> None:
    tensors = matrices("base_model.model.model.layers.0.self_attn.qkv_proj", rows=10)
    adapter = saved(tmp_path, tensors, {"qkv_proj": {"q_proj": 6, "k_proj": 2, "v_proj": 2}})
    rows = {name.rpartition(".")[2]: addition.up.rows for name, addition in adapter.additions.items()}
    assert rows == {"q_proj": slice(0, 6), "k_proj": slice(6, 8), "v_proj": slice(8, 10)}
    with pytest.raises(CheckpointError, match=r"lora_B.*expected 12 rows, found 10"):
        saved(tmp_path, tensors, {"qkv_proj": {"q_proj": 8, "k_proj": 2, "v_proj": 2}})


def test_a_fused_module_of_a_shared_expert_has_its_own_width(tmp_path: Path) -> None:
    parts = {
        "gate_up_proj": {"gate_proj": 6, "up_proj": 6},
        "shared_experts.gate_up_proj": {"gate_proj": 3, "up_proj": 3},
    }
    block = "model.layers.0.mlp"
    for above, rows in ((block, 12), (f"{block}.shared_experts", 6)):
        adapter = saved(tmp_path, matrices(f"base_model.model.{above}.gate_up_proj", rows=rows), parts)
        found = {name: addition.up.rows for name, addition in adapter.additions.items()}
        assert found == {
            f"{above}.gate_proj": slice(0, rows // 2),
            f"{above}.up_proj": slice(rows // 2, rows),
        }


def test_fused_queries_keys_and_values_of_each_head_are_taken_apart(tmp_path: Path) -> None:
    rows = QKVRows("kv_heads").parts(4, 4, 2)
    tensors = matrices("base_model.model.model.layers.0.self_attn.qkv_proj", rows=12)
    adapter = saved(tmp_path, tensors, target=TargetModel({"qkv_proj": rows}))
    up = next(value for name, value in tensors.items() if "lora_B" in name)
    expected = {"q_proj": [0, 1, 6, 7], "k_proj": [2, 3, 8, 9], "v_proj": [4, 5, 10, 11]}
    for name, addition in adapter.additions.items():
        np.testing.assert_array_equal(addition.up.read(adapter.file), up[expected[name.rpartition(".")[2]]])
        assert addition.up.shape == (4, 2)


def test_a_transposed_module_of_the_base_is_accepted_if_the_model_has_some(tmp_path: Path) -> None:
    """PEFT says so for GPT-2, whose layers have matrices of inputs by outputs; those of adapters do not differ."""
    saved(tmp_path, target=TargetModel(is_transposed=True), fan_in_fan_out=True)
    with pytest.raises(CheckpointError, match="fan_in_fan_out"):
        saved(tmp_path, fan_in_fan_out=True)


RECURRENT = TargetModel(recurrent=frozenset({"in_proj", "out_proj"}))


def test_projections_of_recurrent_mixers_are_modules_of_models_that_have_them(tmp_path: Path) -> None:
    tensors = matrices("base_model.model.model.layers.0.mamba.in_proj")
    assert list(saved(tmp_path, tensors, target=RECURRENT).additions) == ["model.layers.0.mamba.in_proj"]
    with pytest.raises(CheckpointError, match=r"adapter 'mine': .*layers\.0\.mamba\.in_proj.*, found in_proj"):
        saved(tmp_path, tensors)


def test_a_convolution_is_no_module_of_adapters(tmp_path: Path) -> None:
    module = "base_model.model.model.layers.0.mamba.conv1d"
    tensors = {
        f"{module}.lora_A.weight": np.ones((2, 64, 4), np.float32),
        f"{module}.lora_B.weight": np.ones((64, 2, 1), np.float32),
    }
    with pytest.raises(CheckpointError, match=r"adapter 'mine': .*layers\.0\.mamba\.conv1d.*, found conv1d"):
        saved(tmp_path, tensors, target=RECURRENT)


EXPERTS = "model.layers.0.mlp.experts"


def ungated(width: int) -> TargetModel:
    return TargetModel(experts=TargetExperts(3, 4, width, has_gate=False))


@pytest.mark.parametrize("version", ["0.18.1", "0.19.1"])
def test_the_version_tells_which_parameter_of_experts_without_a_gate_an_adapter_changes(
    tmp_path: Path, version: str
) -> None:
    """Experts have 4 inputs and are 6 wide; `lora_A` had the width of the outputs before 0.19.1."""
    wide, narrow = (6, 4) if version == "0.18.1" else (4, 6)
    tensors = matrices(f"base_model.model.{EXPERTS}.base_layer", rank=6, rows=narrow, columns=wide)
    tensors |= matrices(f"base_model.model.{EXPERTS}", rank=6, rows=wide, columns=narrow)
    adapter = saved(tmp_path, tensors, target=ungated(6), peft_version=version)
    shapes = {name: (addition.up.shape[0], addition.down.shape[1]) for name, addition in adapter.additions.items()}
    assert shapes == {
        f"{EXPERTS}.{expert}.{name}": shape
        for expert in range(3)
        for name, shape in (("up_proj", (6, 4)), ("down_proj", (4, 6)))
    }
    with pytest.raises(CheckpointError, match="key 'peft_version': expected, since experts have no gate, found none"):
        saved(tmp_path, tensors, target=ungated(6))


def test_square_experts_without_a_gate_cannot_be_distinguished(tmp_path: Path) -> None:
    tensors = matrices(f"base_model.model.{EXPERTS}", rank=6, rows=4, columns=4)
    with pytest.raises(
        CheckpointError, match="widths that tell up_proj and down_proj of the experts apart, found 4 and 4"
    ):
        saved(tmp_path, tensors, target=ungated(4), peft_version="0.21.2")


@pytest.mark.parametrize(
    ("version", "layout", "expected"),
    [
        (None, None, None),
        ("0.18.1", None, True),
        ("0.19.0", "halves", True),
        ("0.19.1", None, False),
        ("0.20.1.dev0@0123abc", None, False),
        ("1.0.0", None, False),
        (None, "interleaved", False),
        ("0.18.1", "halves_by_inputs", False),
        ("0.19.0", "interleaved", True),
        ("0.19.1", "interleaved", False),
    ],
)
def test_versions_of_peft_that_exchanged_inputs_and_outputs(version: Any, layout: Any, expected: bool | None) -> None:
    assert is_exchanged(version, layout) is expected


def test_text_models_inside_others_have_their_own_names(tmp_path: Path) -> None:
    adapter = saved(tmp_path, matrices("base_model.model.model.language_model.layers.0.self_attn.q_proj"))
    assert list(adapter.additions) == [MODULE]


def test_patterns_of_alpha_match_the_names_of_modules_in_training(tmp_path: Path) -> None:
    name = "model.language_model.layers.0.self_attn.q_proj"
    tensors = matrices(f"base_model.model.{name}")
    for pattern, scale in ((name, 4.0), (f"^{name}", 4.0), (MODULE, 3.0)):
        found = saved(tmp_path, tensors, alpha_pattern={pattern: 8}).additions[MODULE].scale
        assert found == pytest.approx(scale), pattern


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"peft_type": "IA3"}, r"key 'peft_type': supported: 'LORA', found 'IA3'"),
        ({"use_dora": True}, "key 'use_dora'"),
        ({"bias": "all"}, "key 'bias'"),
        ({"modules_to_save": ["lm_head"]}, "key 'modules_to_save'"),
        ({"fan_in_fan_out": True}, "key 'fan_in_fan_out'"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's weights as well"),
        ({"init_lora_weights": "lora_ga"}, "changes the model's weights as well"),
        ({"use_bdlora": {"nblocks": 2}}, "key 'use_bdlora'"),
        ({"arrow_config": {"top_k": 2}}, "key 'arrow_config'"),
        ({"alpha_pattern": ["q_proj"]}, "key 'alpha_pattern': expected an object"),
        (
            {"alpha_pattern": {r"([\w.]+)+!": 8}},
            "key 'alpha_pattern': expected up to 256 characters, 3 repeats and no rep",
        ),
        ({"alpha_pattern": {".*" * 4 + "!": 8}}, "key 'alpha_pattern': expected up to 256 characters, 3 repeats"),
        ({"lora_alpha": "much"}, "key 'lora_alpha': expected a number"),
    ],
)
def test_other_methods_are_rejected(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        saved(tmp_path, **changes)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({}, "expected tensors .* found none"),
        ({f"{Q_PROJ}.lora_A.weight": np.ones((2, 64), np.float32)}, "the other matrix of its module"),
        (matrices() | {f"{Q_PROJ}.lora_magnitude_vector": np.ones(64, np.float32)}, "lora_magnitude_vector"),
        (matrices("base_model.model.lm_head"), "to belong to one of .*, found lm_head"),
        (matrices("base_model.model.model.vision_tower.layers.0.q_proj"), "of the language model"),
        (matrices("base_model.model.model.layers.0.mlp.gate"), "to belong to one of .*, found gate"),
        (
            matrices("base_model.model.model.layers.0.mlp.experts"),
            "the model, which has no experts, found model.layers.0",
        ),
        (matrices("base_model.model.model.layers.0.mlp.experts.base_layer"), "which has no experts"),
        (matrices(rank=513), "the first from 1 to 512"),
        (matrices() | {f"{Q_PROJ}.lora_B.weight": np.ones((64, 3), np.float32)}, "the second 2, found"),
        (matrices() | {f"{Q_PROJ}.lora_B.weight": np.ones((), np.float32)}, r"the second 2, found \(\)"),
        (matrices(rows=0), r"the second 2, found \(0, 2\)"),
        (matrices(columns=0), r"the first from 1 to 512, found \(2, 0\)"),
    ],
)
def test_tensors_that_mean_something_else_are_rejected(
    tmp_path: Path, tensors: dict[str, np.ndarray], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        saved(tmp_path, tensors)


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter 'mine': .*expected a folder with adapter_config.json"):
        open_adapter("mine", tmp_path, TargetModel())
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is not read \(pickle files"):
        open_adapter("mine", tmp_path, TargetModel())
    with pytest.raises(CheckpointError, match=r"adapter 'mine': .*adapter_model\.bin: cannot be read: Not a directory"):
        open_adapter("mine", tmp_path / "adapter_model.bin", TargetModel())


def test_adapters_of_other_shapes_are_rejected(tmp_path: Path) -> None:
    adapters = (saved(tmp_path / "a"), saved(tmp_path / "b", matrices(columns=32)))
    with pytest.raises(CheckpointError, match=r"adapter 'mine': .*where another has"):
        with_adapters(open_model(DATA / "llama3_tiny"), adapters, 4)
