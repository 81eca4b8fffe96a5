"""Pooling is read from sentence-transformers' files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.checkpoint.sentence.modules import SentenceModules, read_sentence_modules
from jaxserve.checkpoint.sentence.texts import TextSettings
from jaxserve.config import Config, ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.embedding import embedding_info, make_embedding_skeleton
from jaxserve.model_config.embedding_head import HeadLayer
from jaxserve.models.registry import model_of, open_model
from jaxserve.runner.backend import Chip
from jaxserve.types import Pooling
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


DENSE = {"pooling_mode": "mean", "in_features": 8, "out_features": 4}


def test_dense_layers_are_read_with_the_activation_that_they_have_without_a_key(tmp_path: Path) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling", "Dense"), modes=DENSE)
    modules = read_sentence_modules(tmp_path)
    assert modules is not None
    assert modules.dense == (HeadLayer("2_Dense/linear", 8, 4, has_bias=True, activation="tanh"),)


def test_prompts_lower_case_and_the_activation_of_scores_are_read(tmp_path: Path) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), modes={"pooling_mode": "mean"})
    config = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    modules = read_sentence_modules(tmp_path)
    assert modules is not None
    assert modules.texts == TextSettings(config["prompts"], "query", is_lowered=True)
    encoder = model_of(open_model(DATA / "encoders" / "bert_tiny"))
    info = embedding_info(Config(model=ModelConfig(model="any")), encoder, modules)
    assert (info.prompts, info.default_prompt, info.lowers_texts) == (config["prompts"], "query", True)


@pytest.mark.parametrize(("name", "expected"), [("Identity", "none"), ("Sigmoid", "sigmoid"), (None, "none")])
def test_the_newer_file_says_whether_scores_go_through_a_sigmoid(
    tmp_path: Path, name: str | None, expected: str
) -> None:
    write(tmp_path, kinds=("Transformer",), modes={})
    activation = None if name is None else f"torch.nn.modules.activation.{name}"
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": activation}))
    scorer = model_of(open_model(DATA / "encoders" / "bert_cross_tiny"))  # its config names Identity
    config = Config(model=ModelConfig(model="any"))
    skeleton = make_embedding_skeleton(config, scorer, Chip("cpu", None), read_sentence_modules(tmp_path))
    assert skeleton.config.head is not None
    assert skeleton.config.head.activation == expected


@pytest.mark.parametrize(
    ("modes", "config", "expected"),
    [
        ({}, {"prompts": {"query": 1}}, "prompts: expected a table of texts"),
        ({}, {"prompts": {"query": "q"}, "default_prompt_name": "other"}, "default_prompt_name: expected the name"),
        ({}, {"activation_fn": "torch.nn.Tanh"}, "activation_fn: expected one of Sigmoid, Identity, found 'Tanh'"),
        (
            {"include_prompt": False},
            {"prompts": {"query": "q"}, "default_prompt_name": "query"},
            "a default prompt, which its pooling leaves out",
        ),
    ],
)
def test_settings_of_texts_that_are_not_computed_are_rejected(
    tmp_path: Path, modes: dict[str, Any], config: dict[str, Any], expected: str
) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), modes={"pooling_mode": "mean", **modes})
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        read_sentence_modules(tmp_path)
    assert expected in str(caught.value)


def test_a_pooling_that_leaves_prompts_out_has_none_to_choose(tmp_path: Path) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), modes={"pooling_mode": "mean", "include_prompt": False})
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    modules = read_sentence_modules(tmp_path)
    assert modules is not None
    assert modules.texts.prompts == {}


def test_modules_of_the_tiny_encoders_are_read() -> None:
    assert read_sentence_modules(DATA / "encoders" / "bert_tiny") == SentenceModules("mean", True, 48)
    assert read_sentence_modules(DATA / "encoders" / "roberta_tiny") == SentenceModules("cls", False, 60)


def test_last_token_pooling_is_read_without_a_length(tmp_path: Path) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), modes={"pooling_mode_lasttoken": True, "include_prompt": True})
    assert read_sentence_modules(tmp_path) == SentenceModules("last", False, None)


@pytest.mark.parametrize(
    ("mode", "expected"), [("cls", "cls"), ("mean", "mean"), ("lasttoken", "last"), (["mean"], "mean")]
)
def test_pooling_may_be_named_by_one_key_as_sentence_transformers_saves_it_since_5_4(
    tmp_path: Path, mode: Any, expected: Pooling
) -> None:
    modes = {"embedding_dimension": 384, "pooling_mode": mode, "include_prompt": True}
    write(tmp_path, kinds=("Transformer", "Pooling"), modes=modes)
    assert read_sentence_modules(tmp_path) == SentenceModules(expected, False, None)


@pytest.mark.parametrize(
    ("declared", "expected"), [(512, 512), (1000000000000000019884624838656, None), (1e30, None), (None, None)]
)
def test_the_longest_text_is_the_tokenizers_without_a_length_of_its_own(
    tmp_path: Path, declared: Any, expected: int | None
) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), modes={"pooling_mode": "mean"})
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": declared}))
    assert read_sentence_modules(tmp_path) == SentenceModules("mean", False, expected)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert read_sentence_modules(tmp_path) == SentenceModules("mean", False, 128)


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "distilbert"])
def test_the_longest_text_may_be_in_a_file_named_by_the_kind_of_model(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kinds=("Transformer", "Pooling"), modes={"pooling_mode": "mean"})
    (tmp_path / f"sentence_{kind}_config.json").write_text('{"max_seq_length": 128}')
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert read_sentence_modules(tmp_path) == SentenceModules("mean", False, 128)


def test_a_cross_encoder_has_a_transformer_alone(tmp_path: Path) -> None:
    write(tmp_path, kinds=("Transformer",), modes={}, max_tokens=256)
    modules = read_sentence_modules(tmp_path)
    assert modules == SentenceModules(None, False, 256)
    config = Config(model=ModelConfig(model="any"))
    scorer, encoder = (model_of(open_model(DATA / "encoders" / name)) for name in ("bert_cross_tiny", "bert_tiny"))
    assert embedding_info(config, scorer, modules).pooling == "cls"
    with pytest.raises(ConfigError, match="lists no Pooling; name one: last, mean or cls"):
        embedding_info(config, encoder, modules)
    asked = replace(config, model=replace(config.model, pooling="mean"))
    assert embedding_info(asked, encoder, modules).pooling == "mean"


def test_a_directory_without_modules_has_no_pooling(tmp_path: Path) -> None:
    assert read_sentence_modules(tmp_path) is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"kinds": ("Transformer", "Pooling", "WordWeights"), "modes": {"pooling_mode": "mean"}}, "'WordWeights'"),
        (
            {"kinds": ("Pooling", "Normalize", "Dense"), "modes": {"pooling_mode": "mean"}},
            "after Pooling and before Normalize",
        ),
        ({"kinds": ("Dense",), "modes": {}}, "after Pooling and before Normalize"),
        (
            {"kinds": ("Pooling", "Dense"), "modes": {**DENSE, "out_features": 0}},
            "out_features: expected integers from 1",
        ),
        (
            {"kinds": ("Pooling", "Dense"), "modes": {**DENSE, "activation_function": "torch.nn.ELU"}},
            "activation_function: expected one of Identity, Tanh, ReLU, GELU, SiLU, found 'ELU'",
        ),
        ({"kinds": ("Pooling", "Dense"), "modes": {**DENSE, "use_residual": True}}, "use_residual: expected false"),
        (
            {"kinds": ("Pooling", "Dense"), "modes": {**DENSE, "module_input_name": "token_embeddings"}},
            "module_input_name and module_output_name: expected sentence_embedding",
        ),
        ({"kinds": ("Pooling",), "modes": {"pooling_mode_max_tokens": True}}, "found 'pooling_mode_max_tokens'"),
        ({"kinds": ("Pooling",), "modes": {}}, "to be true, found none"),
        (
            {"kinds": ("Pooling",), "modes": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}},
            "'pooling_mode_mean_tokens', 'pooling_mode_cls_token'",
        ),
        (
            {"kinds": ("Pooling",), "modes": {"pooling_mode": "max"}},
            "pooling_mode: expected one of cls, mean, lasttoken",
        ),
        ({"kinds": ("Pooling",), "modes": {"pooling_mode": ["cls", "mean"]}}, "found \"['cls', 'mean']\""),
        ({"kinds": ("Pooling",), "modes": {"pooling_mode": [{}]}}, "found '[{}]'"),
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
