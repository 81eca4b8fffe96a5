"""Pooling is read from sentence-transformers' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoint.sentence import SentenceModules, read_sentence_modules
from jaxserve.errors import CheckpointError
from tests.models.goldens import DATA


def write(folder: Path, *, kinds: tuple[str, ...], modes: dict[str, Any], max_tokens: Any = None) -> Path:
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    for i, kind in enumerate(kinds):
        (folder / f"{i}_{kind}").mkdir()
        (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(modes))
    if max_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    return folder


def test_modules_of_the_tiny_encoders_are_read() -> None:
    assert read_sentence_modules(DATA / "encoders" / "bert_tiny") == SentenceModules("mean", True, 48)
    assert read_sentence_modules(DATA / "encoders" / "roberta_tiny") == SentenceModules("cls", False, 60)


def test_last_token_pooling_is_read_without_a_length(tmp_path: Path) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), modes={"pooling_mode_lasttoken": True, "include_prompt": True})
    assert read_sentence_modules(tmp_path) == SentenceModules("last", False, None)


def test_a_directory_without_modules_has_no_pooling(tmp_path: Path) -> None:
    assert read_sentence_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"kinds": ("Transformer", "Pooling", "Dense"), "modes": {"pooling_mode_mean_tokens": True}}, "'Dense'"),
        ({"kinds": ("Transformer",), "modes": {}}, "a module of type Pooling, found none"),
        ({"kinds": ("Pooling",), "modes": {"pooling_mode_max_tokens": True}}, "found 'pooling_mode_max_tokens'"),
        ({"kinds": ("Pooling",), "modes": {}}, "to be true, found none"),
        (
            {"kinds": ("Pooling",), "modes": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}},
            "'pooling_mode_mean_tokens', 'pooling_mode_cls_token'",
        ),
        (
            {"kinds": ("Pooling",), "modes": {"pooling_mode_mean_tokens": True}, "max_tokens": 0},
            "max_seq_length: expected an integer from 1",
        ),
    ],
)
def test_unsupported_modules_are_rejected(tmp_path: Path, case: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_sentence_modules(write(tmp_path, **case))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_module_outside_of_the_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "Pooling", "path": "../elsewhere"}]')
    with pytest.raises(CheckpointError, match="expected the name of a folder beside it"):
        read_sentence_modules(tmp_path)
