"""The settings of each model of `--model`: its file over the common ones, and one line for what cannot be."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from jaxserve.cli.flags import add_flags, add_model_flag, config_from_flags, configs_from_flags
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import default_model, load_config, load_settings
from jaxserve.runtime.models.model_configs import configs_of_models, entries_of_flags

EMBED = "model: /models/minilm\ntask: embed\nmax_num_seqs: 8\nreasoning_parser: none\n"


def configs(*models: str, **flags: object) -> list[Config]:
    return configs_of_models(entries_of_flags(models), load_settings(flags, {}, None).values)


@pytest.fixture
def embed(tmp_path: Path) -> Path:
    file = tmp_path / "embed.yaml"
    file.write_text(EMBED)
    return file


def test_common_settings_hold_for_each_model_unless_its_file_says_otherwise(embed: Path) -> None:
    chat, vectors = configs("chat=org/model", f"vectors={embed}", max_num_seqs="4", dtype="float32", port="1234")
    assert (chat.model.model, chat.model.served_model_name, chat.model.task) == ("org/model", "chat", "auto")
    assert (vectors.model.model, vectors.model.served_model_name, vectors.model.task) == (
        "/models/minilm",
        "vectors",
        "embed",
    )
    assert (chat.scheduler.max_num_seqs, vectors.scheduler.max_num_seqs) == (4, 8)
    assert (chat.model.dtype, vectors.model.dtype) == ("float32", "float32")
    assert (chat.server.port, vectors.server.port) == (1234, 1234)
    assert (chat.server.reasoning_parser, vectors.server.reasoning_parser) == ("auto", "none")


def test_a_single_model_may_have_a_name_or_none() -> None:
    assert configs("a=b")[0].model.served_model_name == "a"
    assert configs("org/model")[0].model.model == "org/model"


def test_the_default_model_is_named_default_unless_there_is_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chat, vectors = configs("chat=default", "vectors=org/model")
    assert (chat.model.model, chat.model.served_model_name) == (str(default_model()), "chat")
    assert vectors.model.model == "org/model"
    (only,) = configs("default")
    assert (only.model.model, only.model.served_model_name) == (str(default_model()), "SmolLM2-135M-Instruct")
    (tmp_path / "default").mkdir()
    assert configs("default")[0].model.model == "default"
    assert load_config().model.model == str(default_model()), "without MODEL the working directory does not matter"


@pytest.mark.parametrize(
    ("models", "flags", "message"),
    [
        (("a=x", "y"), {}, "--model 'y': expected NAME=MODEL or NAME=FILE.yaml"),
        (("a=x", "=y"), {}, "--model '=y': expected"),
        (("a=x", "b,c=y"), {}, "--model 'b,c=y': expected"),
        (("a=x", "a=y"), {}, "two models have the name 'a'"),
        (("a=x", "b=y"), {"api_processes": "2"}, "--api-processes 2: not with several models"),
        (("a=x", "b=y"), {"replicas": "2"}, "--replicas 2: not with several models"),
        (("a=x", "b=y"), {"num_hosts": "2", "coordinator": "h:1", "host_rank": "0"}, "--num-hosts 2: not with several"),
        (("a=x", "b=y"), {"lora_modules": "sql=p"}, "--lora-modules: belongs to one model"),
        (("a=x", "b=y"), {"mmproj": "p"}, "--mmproj: belongs to one model"),
        (("a=x", "b=y"), {"kv_offload_dir": "p"}, "--kv-offload-dir: belongs to one model"),
        (("a=x", "b=y"), {"served_model_name": "c"}, "--served-model-name: each model has the name before its `=`"),
        (("a=x",), {"served_model_name": "c"}, "--served-model-name: each model has the name before its `=`"),
        (("a=x", "b=missing.yaml"), {}, "missing.yaml: No such file"),
    ],
)
def test_what_cannot_be_is_one_line(models: tuple[str, ...], flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs(*models, **flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nport: 1\n", ":2: port: a setting of the server, not of one of its models"),
        ("task: embed\n", ":1: model: missing"),
        ("model: x\nserved_model_name: y\n", "the name is given by `--model NAME="),
        ("models: {c: x}\n", ":1: models: a model's own file has the settings of one model"),
        ("model: x\nmax_num_seq: 1\n", ":2: max_num_seq: unknown key; did you mean `max_num_seqs`?"),
    ],
)
def test_mistakes_in_a_models_file_name_it(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        configs("a=x", f"b={file}")
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nreplicas: 2\n", r"^--replicas 2 \(b\): not with several models"),
        ("model: x\nexpert_parallel_size: 3\n", "^b: --expert-parallel-size 3"),
    ],
)
def test_own_settings_that_cannot_be_combined_name_the_model(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        configs("a=x", f"b={file}")


def test_model_and_positional_model_exclude_each_other() -> None:
    parser = argparse.ArgumentParser()
    add_model_flag(parser)
    add_flags(parser)
    with pytest.raises(ConfigError, match="MODEL or --model, not both"):
        configs_from_flags(parser.parse_args(["x", "--model", "a=y"]))
    found = configs_from_flags(parser.parse_args(["--model", "a=y", "--model", "b=z"]))
    assert [config.model.model for config in found] == ["y", "z"]


MAPPING = """
max_num_seqs: 4
dtype: float32
models:
  chat: org/model
  vectors:
    model: {model: /models/minilm, task: embed}
    max_num_seqs: 8
    reasoning_parser: none
"""


def given(file: Path, *words: str) -> list[Config]:
    """Return the configs of `jaxserve serve WORDS --config FILE`."""
    parser = argparse.ArgumentParser()
    add_model_flag(parser)
    add_flags(parser)
    return configs_from_flags(parser.parse_args([*words, "--config", str(file)]))


def test_models_of_a_config_file_equal_those_of_flags(tmp_path: Path, embed: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(MAPPING)
    expected = configs("chat=org/model", f"vectors={embed}", max_num_seqs="4", dtype="float32")
    assert given(file) == expected
    file.write_text(f"max_num_seqs: 4\ndtype: float32\nmodels: {{chat: org/model, vectors: {embed}}}\n")
    assert given(file) == expected
    assert [config.scheduler.max_num_seqs for config in given(file, "--max-num-seqs", "5")] == [5, 8]


def test_a_flag_or_variable_that_names_a_model_wins_over_the_files_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(MAPPING)
    assert [config.model.served_model_name for config in given(file, "--model", "a=x", "--model", "b=y")] == ["a", "b"]
    assert [(config.model.model, config.model.dtype) for config in given(file, "other")] == [("other", "float32")]
    monkeypatch.setenv("JAXSERVE_MODEL", "of/environment")
    assert [config.model.model for config in given(file)] == ["of/environment"]


def test_a_command_for_one_model_refuses_a_file_with_several(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(MAPPING)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(ConfigError, match=r"server\.yaml: models\.chat: this command takes one model: give MODEL"):
        config_from_flags(parser.parse_args(["--config", str(file)]))
    assert config_from_flags(parser.parse_args(["x", "--config", str(file)])).scheduler.max_num_seqs == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a]\n", ":1: models: expected lines of `NAME: MODEL`"),
        ("models:\n", ":1: models: expected lines of `NAME: MODEL`"),
        ("models: {a: [3]}\n", r"models.a \['3'\]: expected `NAME: MODEL`"),
        ("models: {'a,b': x}\n", "expected instead of 'a,b'"),
        ("models: {a: x, a: y}\n", "models.a: given twice, first in line 1"),
        ("model: z\nmodels: {a: x}\n", ":1: model: not beside `models`"),
        ("served_model_name: z\nmodels: {a: x}\n", ":1: served_model_name: the models have the names of `models`"),
        ("models: {a: x, b: {task: embed}}\n", "models.b.model: missing"),
        ("models: {a: {model: x, port: 1}}\n", "models.a.port: a setting of the server"),
        ("models: {a: {model: x, task: embd}}\n", "models.a.task 'embd': expected one of auto, generate, embed"),
        ("models: {a: {model: x, cache: {max_num_seq: 1}}}\n", "models.a.max_num_seq: unknown key"),
        ("api_processes: 2\nmodels: {a: x, b: y}\n", "--api-processes 2: not with several models"),
    ],
)
def test_mistakes_in_the_models_of_a_file_name_their_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        given(file)
