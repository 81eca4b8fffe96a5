"""The settings of each model of `--model`: its file over the common ones, and one line for what cannot be."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from jaxserve.cli.flags import add_flags, add_model_flag, configs_from_flags
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import load_values
from jaxserve.runtime.models.model_configs import configs_of_models

EMBED = "model: /models/minilm\ntask: embed\nmax_num_seqs: 8\nreasoning_parser: none\n"


def configs(*models: str, **flags: object) -> list[Config]:
    return configs_of_models(models, load_values(flags, {}, None, needs_model=False))


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


@pytest.mark.parametrize(
    ("models", "flags", "message"),
    [
        (("a=x", "y"), {}, "--model 'y': expected NAME=MODEL or NAME=FILE.yaml"),
        (("a=x", "=y"), {}, "--model '=y': expected"),
        (("a=x", "b,c=y"), {}, "--model 'b,c=y': expected"),
        (("a=x", "a=y"), {}, "two models have the name 'a'"),
        (("a=x", "b=y"), {"api_processes": "2"}, "--api-processes 2: not with several models"),
        (("a=x", "b=y"), {"replicas": "2"}, r"--replicas 2 \(a\): not with several models"),
        (("a=x", "b=y"), {"num_hosts": "2", "coordinator": "h:1", "host_rank": "0"}, "--num-hosts 2: not with several"),
        (("a=x", "b=y"), {"lora_modules": "sql=p"}, "--lora-modules: belongs to one model"),
        (("a=x", "b=y"), {"kv_offload_dir": "p"}, "--kv-offload-dir: belongs to one model"),
        (("a=x", "b=y"), {"served_model_name": "c"}, "--served-model-name: several models have the names"),
        (("a=x", "b=missing.yaml"), {}, "missing.yaml: No such file"),
    ],
)
def test_what_cannot_be_is_one_line(models: tuple[str, ...], flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configs(*models, **flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nport: 1\n", "`port` is a setting of the server, not of one of its models"),
        ("task: embed\n", "`model` is missing"),
        ("model: x\nserved_model_name: y\n", "the name is given by `--model NAME="),
        ("model: x\nmax_num_seq: 1\n", "unknown key `max_num_seq`; did you mean `max_num_seqs`?"),
    ],
)
def test_mistakes_in_a_models_file_name_it(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        configs("a=x", f"b={file}")
    assert str(file) in str(caught.value)


def test_model_and_positional_model_exclude_each_other() -> None:
    parser = argparse.ArgumentParser()
    add_model_flag(parser)
    add_flags(parser)
    with pytest.raises(ConfigError, match="MODEL or --model, not both"):
        configs_from_flags(parser.parse_args(["x", "--model", "a=y"]))
    found = configs_from_flags(parser.parse_args(["--model", "a=y", "--model", "b=z"]))
    assert [config.model.model for config in found] == ["y", "z"]
