"""Every file in configs/ is taken by the loader that `jaxserve serve --config` uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.runtime.api_process import is_loopback
from jaxserve.runtime.environment import load_config

CONFIGS = Path(__file__).parents[3] / "configs"
RAY_SERVE = CONFIGS / "ray-serve.yaml"
"""The file that `serve run` takes; tests/unit/ray reads it."""
FILES = sorted(set(CONFIGS.glob("*")) - {RAY_SERVE})


def test_there_is_a_config_for_each_kind_of_device_and_task() -> None:
    assert [file.name for file in FILES] == ["gpu-8b.yaml", "laptop-cpu.yaml", "minilm-cpu.yaml", "tpu-v5e.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_file_is_loaded(file: Path) -> None:
    alone = load_config(flags={"model": "other", "port": "1"})
    config = load_config(flags={"model": "other", "port": "1"}, file=file)
    assert config.model.model == "other"
    assert config.server.port == 1
    assert config.scheduler != alone.scheduler, "the file changed nothing"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_servers_without_keys_are_for_this_host_only(file: Path) -> None:
    config = load_config(file=file)
    assert config.server.api_key is not None or is_loopback(config.server.host)
