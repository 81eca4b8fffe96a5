"""`jaxserve compile`: its mistakes in one line, and the command that it proposes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from jaxserve.cli import compile as compile_command
from jaxserve.cli import plan as plan_command
from jaxserve.cli.compile import _flags, _settings
from jaxserve.cli.main import main
from jaxserve.runtime.environment import load_config
from tests.models.goldens import golden_checkpoint


def test_where_to_write_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "model"]) == 2
    assert capsys.readouterr().err == "jaxserve: error: --output is missing: the folder to write\n"


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "./nowhere", "--output", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_place_that_is_no_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["compile", str(golden_checkpoint("llama3_tiny").path), "--output", str(file)]) == 2
    assert capsys.readouterr().err == f"jaxserve: error: --output {file}: File exists\n"


def test_settings_that_were_chosen_are_kept_and_repeated() -> None:
    flags = {"model": "m", "dtype": "bfloat16", "kv_cache_memory": "2GiB", "enable_prefix_caching": False, "port": 9}
    config = load_config(flags=flags)
    assert _settings(config) == {"dtype": "bfloat16", "kv_cache_memory": "2GiB", "enable_prefix_caching": "false"}
    words = _flags(config)
    assert words == ["--dtype", "bfloat16", "--kv-cache-memory", "2GiB", "--no-enable-prefix-caching"]
    again = load_config(
        flags={"model": "m", "dtype": words[1], "kv_cache_memory": words[3], "enable_prefix_caching": False}
    )
    assert dataclasses.replace(again, server=config.server) == config


def test_copies_of_pages_decide_programs_and_are_repeated_without_the_secret() -> None:
    config = load_config(flags={"model": "m", "kv_offload_memory": "1GiB", "kv_peer_token": "secret"})
    words = _flags(config)
    assert words == ["--kv-offload-memory", "1GiB"]
    for command in (compile_command, plan_command):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        assert parser.parse_args(["m", *words]).kv_offload_memory
