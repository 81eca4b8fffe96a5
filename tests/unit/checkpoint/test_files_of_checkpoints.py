"""The files that a checkpoint's parameters depend on: all of them, and no others of its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.checkpoint.open import checkpoint_files
from jaxserve.errors import CheckpointError


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}")


def test_a_directory_has_its_weights_and_configs(tmp_path: Path) -> None:
    names = {"config.json", "hf_quant_config.json", "model.safetensors"}
    write(tmp_path, *names)
    write(tmp_path, "tokenizer.json", "optimizer.pt", "global_step10/rank_0.pt", "consolidated.safetensors")
    (tmp_path / "vanished.tmp").symlink_to(tmp_path / "nothing")
    assert checkpoint_files(tmp_path) == {name: tmp_path / name for name in names}


def test_a_directory_of_shards_has_those_of_its_index(tmp_path: Path) -> None:
    names = {"config.json", "model.safetensors.index.json", "a.safetensors", "b.safetensors"}
    write(tmp_path, *names, "c.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert checkpoint_files(tmp_path) == {name: tmp_path / name for name in names}
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        checkpoint_files(tmp_path)


def test_a_conversion_has_its_arrays_manifest_and_config(tmp_path: Path) -> None:
    names = {"config.json", "jaxserve.json", "arrays/d/1"}
    write(tmp_path, *names, "tokenizer.json")
    assert checkpoint_files(tmp_path) == {name: tmp_path / name for name in names}


def test_a_training_run_has_its_newest_step_and_its_config_under_the_names_of_the_step(tmp_path: Path) -> None:
    write(tmp_path, "config.json", "tokenizer.json", "1000/items/_METADATA", "2000/items/_METADATA", "2000/items/d/1")
    items = tmp_path / "2000" / "items"
    expected = {name: items / name for name in ("_METADATA", "d/1")} | {"config.json": tmp_path / "config.json"}
    assert [checkpoint_files(path) for path in (tmp_path, tmp_path / "2000", items)] == [expected] * 3


def test_a_file_has_its_image_encoder_beside_it(tmp_path: Path) -> None:
    model, encoder = tmp_path / "model.gguf", tmp_path / "encoder.gguf"
    assert checkpoint_files(model) == {"model.gguf": model}
    assert checkpoint_files(model, encoder) == {"model.gguf": model, "mmproj": encoder}
