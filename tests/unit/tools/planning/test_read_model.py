"""A plan reads the shapes of a model from config.json or GGUF headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.tools.planning.planner import read_model
from tests.unit.tools.planning.configs import TINY, write_config

TINY_CHECKPOINT = Path(__file__).parents[3] / "models" / "data" / "llama3_tiny"


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    model = read_model(write_config(tmp_path, TINY))
    assert (model.decoder.num_layers, model.stored_bytes, model.stored_dtypes) == (2, None, ())


def test_stored_weights_are_counted_by_header() -> None:
    model = read_model(TINY_CHECKPOINT)
    assert model.stored_bytes is not None
    assert 0 < model.stored_bytes < sum(file.stat().st_size for file in TINY_CHECKPOINT.glob("*.safetensors"))
    assert model.stored_dtypes


def test_neither_config_nor_weights_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors"):
        read_model(tmp_path)


def test_a_refused_config_names_the_directory(tmp_path: Path) -> None:
    write_config(tmp_path, TINY | {"hidden_act": "relu6"})
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_model(tmp_path)
