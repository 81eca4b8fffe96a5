"""Sampling defaults come from the file that the setting names, within the limits of requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.executor.local import sampling_defaults
from jaxserve.quant.tensor import TensorInfo


@dataclass
class Described:
    """A checkpoint without tensors."""

    path: Path
    generation_config: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    def read(self, name: str) -> np.ndarray:
        raise KeyError(name)


QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_new_tokens": 128, "min_p": None}


def test_values_of_the_checkpoint_are_taken_unless_none_are_wanted(tmp_path: Path) -> None:
    checkpoint = Described(tmp_path, QWEN)
    assert sampling_defaults("auto", checkpoint) == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert sampling_defaults("none", checkpoint) == {}
    assert sampling_defaults("auto", Described(tmp_path, {"top_k": -1, "eos_token_id": 3})) == {"top_k": 0}


def test_another_file_or_its_folder_takes_its_place(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0, "repetition_penalty": 1.05}))
    for place in (file, tmp_path):
        found = sampling_defaults(str(place), Described(tmp_path, QWEN))
        assert found == {"temperature": 0.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"temperature": 3.5}, "key 'temperature': Expected `float` <= 2.0, found 3.5"),
        ({"top_p": 1.5}, "key 'top_p': Expected `float` <= 1.0, found 1.5"),
        ({"top_k": "20"}, "key 'top_k': Expected `int`, got `str`, found 20"),
        ({"min_p": True}, "key 'min_p': Expected `float`, got `bool`, found True"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused_in_one_line(
    tmp_path: Path, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        sampling_defaults("auto", Described(tmp_path, config))
    advice = "(--generation-config none goes without)"
    assert str(caught.value) == f"{tmp_path / 'generation_config.json'}: {complaint} {advice}"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path / "absent.json")):
        sampling_defaults(str(tmp_path / "absent.json"), Described(tmp_path, {}))
