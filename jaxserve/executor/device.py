"""The device that an engine computes on: never a CPU where `JAX_PLATFORMS` names an accelerator first.

JAX goes on with the next platform if the plugin of the first cannot be used. A server that was started for a GPU would then
compute on the CPU, at a hundredth of the speed.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import jax

from jaxserve.errors import ConfigError
from jaxserve.runner.host.cores import limit_threads

_LOG = logging.getLogger(__name__)
_JAX_LOG = "jax._src.xla_bridge"


def first_device(num_devices: int) -> jax.Device:
    """Return the first device of this host. Without an accelerator, JAX is set to split its CPU into `num_devices` devices, and
    to use no more threads than this process has cores for.

    Raises ConfigError, in one line, if no device can be used, or only a CPU where JAX_PLATFORMS names an accelerator first.
    """
    limit_threads()
    if num_devices > 1 and jax.config.jax_num_cpu_devices < num_devices:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", num_devices)
    platforms = _platforms()
    failures = _PluginFailures()
    logging.getLogger(_JAX_LOG).addFilter(failures)
    try:
        device: jax.Device = jax.local_devices()[0]
    except (RuntimeError, AssertionError) as error:  # AssertionError, without a text, if the plugin is missing
        raise ConfigError(_unusable(platforms, str(error) or failures.reason)) from error
    finally:
        logging.getLogger(_JAX_LOG).removeFilter(failures)
    if device.platform == "cpu" and platforms.partition(",")[0] not in ("", "cpu"):
        raise ConfigError(_unusable(platforms, failures.reason))
    if failures.lines:
        _LOG.warning("JAX computes on %s: %s", device.platform, failures.reason)
    return device


def _platforms() -> str:
    """Return JAX_PLATFORMS, or what it was set to since; empty if JAX may choose."""
    return jax.config.jax_platforms or ""  # type: ignore[attr-defined]


class _PluginFailures(logging.Filter):
    """Keeps the last line of errors that JAX logs with a traceback, and drops the record."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        self.lines.append(next(iter(str(error).splitlines()), type(error).__name__))
        return False

    @property
    def reason(self) -> str:
        return "; ".join(self.lines) or "JAX has no plugin for it"


def _unusable(platforms: str, reason: str) -> str:
    """Return the error, with what is missing on this host if that is known."""
    advice = _missing_driver(platforms.partition(",")[0])
    line = " ".join(reason.split())
    return f"no device can be used with JAX_PLATFORMS={platforms or '(not set)'}: {advice or line}"


def _missing_driver(platform: str) -> str | None:
    """Return what this host, or this container of it, lacks for the platform; None if it seems to have all."""
    if platform in ("cuda", "gpu") and not _has_library("libcuda.so.1"):
        return (
            "NVIDIA's driver (libcuda.so.1) was not found; a container needs its GPUs (docker run --gpus all). "
            "JAX_PLATFORMS=cpu computes on the CPU"
        )
    if platform == "tpu" and not any(found for name in ("accel*", "vfio/[0-9]*") for found in Path("/dev").glob(name)):
        return (
            "there is no TPU chip (/dev/accel*, /dev/vfio/*); a container needs its devices (docker run --privileged). "
            "JAX_PLATFORMS=cpu computes on the CPU"
        )
    return None


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
