"""An engine computes on the platform that JAX_PLATFORMS names first, or says in one line why it cannot."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxserve.errors import ConfigError
from jaxserve.executor import device
from jaxserve.executor.device import first_device

ROOT = Path(__file__).parents[3]
JAX_LOG = logging.getLogger("jax._src.xla_bridge")
PROGRAM = """
from jaxserve.errors import ConfigError
from jaxserve.executor.device import first_device
try:
    print(first_device(1).platform)
except ConfigError as error:
    print(error)
"""


def fail_as_a_plugin_does() -> list[jax.Device]:
    """Log what JAX logs of a plugin that raises, and go on with the CPU."""
    try:
        raise RuntimeError("Unable to load cuPTI. Is it installed?\ndetails")
    except RuntimeError:
        JAX_LOG.exception("Jax plugin configuration error: Exception when calling initialize()")
    return jax.devices("cpu")


def test_a_platform_without_its_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def local_devices() -> list[jax.Device]:
        raise AssertionError  # what JAX says of JAX_PLATFORMS=cuda without the plugin

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(ConfigError, match=r"JAX_PLATFORMS=.*: JAX has no plugin for it"):
        first_device(1)


def test_a_plugin_that_fails_is_one_warning_where_a_cpu_will_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jax, "local_devices", fail_as_a_plugin_does)
    assert first_device(1).platform == "cpu"
    (record,) = caplog.records
    assert record.getMessage() == "JAX computes on cpu: Unable to load cuPTI. Is it installed?"
    assert record.exc_info is None
    caplog.clear()
    fail_as_a_plugin_does()
    assert caplog.records[0].exc_info, "JAX logs as it did before"


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_cpu_does_not_serve_where_a_gpu_was_asked_for(has_driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", fail_as_a_plugin_does)
    monkeypatch.setattr(device, "_platforms", lambda: "cuda,cpu")
    monkeypatch.setattr(device, "_has_library", lambda name: has_driver)
    with pytest.raises(ConfigError) as caught:
        first_device(1)
    reason = "Unable to load cuPTI. Is it installed?" if has_driver else "NVIDIA's driver (libcuda.so.1) was not found"
    assert f"no device can be used with JAX_PLATFORMS=cuda,cpu: {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_jax_without_the_devices_that_the_environment_asks_for_is_one_line() -> None:
    """JAX itself runs here as in an image for CUDA on a host without a GPU, and goes on with the CPU."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    (line,) = ended.stdout.splitlines()
    assert line.startswith("no device can be used with JAX_PLATFORMS=cuda,cpu: ")
    assert "Traceback" not in ended.stderr
