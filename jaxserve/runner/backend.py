"""Which implementation of the kernels an engine takes."""

from __future__ import annotations

import logging

from jaxserve_kernels import native
from jaxserve_kernels.backend import Backend

from jaxserve.config import Config
from jaxserve.errors import ConfigError

_LOG = logging.getLogger(__name__)
_BUILD = "python -m jaxserve_kernels.native.build"


def choose_backend(config: Config, platform: str) -> Backend:
    """What `--cpu-kernels` asks for, or what there is. Registers the native kernels where they are taken.

    They are not for several devices: XLA cannot partition them.
    """
    wanted = config.compile.cpu_kernels
    num_devices = config.parallel.tensor_parallel_size
    is_possible = platform == "cpu" and num_devices == 1
    if wanted == "native" and not is_possible:
        raise ConfigError(f"--cpu-kernels native: only on one CPU device, not on {num_devices} x {platform}")
    is_reference = config.compile.attention_backend == "reference"
    if wanted == "native" and is_reference:
        raise ConfigError("--cpu-kernels native and --attention-backend reference exclude each other")
    if wanted == "xla" or not is_possible or is_reference:
        return "reference"
    if native.register() is not None:
        return "native"
    if wanted == "native":
        raise ConfigError(f"--cpu-kernels native: not built for this host: run `{_BUILD}`")
    _LOG.info("native CPU kernels are not built for this host, XLA's are used; to build them: %s", _BUILD)
    return "reference"
