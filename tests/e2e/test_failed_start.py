"""A checkpoint or a setting that cannot be served: one line that says what, and exit code 2."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import CacheConfig, CompileConfig, Config, ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.executor.local import LocalExecutor
from tests.models.goldens import golden_checkpoint

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sound small checkpoint, to be damaged."""
    return Path(shutil.copytree(golden_checkpoint("llama2_tiny").path, tmp_path / "model"))


def change_config(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def start_error(checkpoint: Path, *flags: str) -> str:
    """The line of a real server that cannot start, without its prefix."""
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", str(checkpoint), "--port", "0", *flags]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    prefix, _, message = ended.stderr.splitlines()[-1].partition("error: ")
    assert prefix == "jaxserve: "
    assert ended.stderr.count(message) == 1, "said once, by one of the two processes"
    return message


@pytest.mark.slow
def test_truncated_weights_are_one_line_and_exit_code_2(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 100)
    message = start_error(checkpoint)
    assert message.startswith(f"{weights}: tensor ")
    assert "expected" in message
    assert f"found {size - 100}" in message


@pytest.mark.slow
def test_config_that_does_not_fit_the_weights_is_one_line_and_exit_code_2(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    wanted, found = config["intermediate_size"] * 2, config["intermediate_size"]
    change_config(checkpoint, intermediate_size=wanted)
    message = start_error(checkpoint)
    assert message.startswith(f"{checkpoint / 'model.safetensors'}: tensor 'model.layers.0.mlp.")
    assert f"{wanted}" in message.partition("expected")[0]
    assert f"{found}" in message.partition("found")[2]


@pytest.mark.slow
def test_config_that_is_not_supported_is_one_line_with_its_path(checkpoint: Path) -> None:
    change_config(checkpoint, hidden_act="tanh")
    message = start_error(checkpoint)
    assert message.startswith(f"{checkpoint}: model config: hidden_act is 'tanh'; supported: silu, ")


@pytest.mark.slow
def test_parsers_that_do_not_go_together_are_one_line_and_exit_code_2(checkpoint: Path) -> None:
    message = start_error(checkpoint, "--tool-call-parser", "hermes", "--reasoning-parser", "harmony")
    assert message.startswith("--tool-call-parser hermes with --reasoning-parser harmony: ")


def refusal(checkpoint: Path, cache: CacheConfig | None = None, **compile_options: Any) -> str:
    """Return the engine's error; it reads no tensor and compiles nothing before that."""
    config = Config(
        model=ModelConfig(model=str(checkpoint)),
        cache=cache or CacheConfig(),
        compile=CompileConfig(compile_cache="off", **compile_options),
    )
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        LocalExecutor.start(config, checkpoint, lambda *progress: None)
    return str(caught.value)


def test_unknown_architecture_is_refused_with_the_path_of_the_checkpoint(checkpoint: Path) -> None:
    change_config(checkpoint, architectures=["NewForCausalLM"])
    message = refusal(checkpoint)
    assert message.startswith(f"{checkpoint}: model config: the architecture 'NewForCausalLM' is not supported")


def test_attention_kernel_that_does_not_exist_is_refused() -> None:
    assert refusal(golden_checkpoint("llama2_tiny").path, attention_backend="pallas") == (
        "--attention-backend pallas: no kernel for CPUs; use auto or reference"
    )


def test_kv_cache_that_the_host_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.runner.memory.available_bytes", lambda: 16 << 10)
    message = refusal(golden_checkpoint("llama2_tiny").path, CacheConfig(kv_cache_memory=1 << 30))
    assert re.fullmatch(
        r"a KV cache of \d+\.\d\d GiB is more than the 0\.00 GiB that are free on this host: .*", message
    )
