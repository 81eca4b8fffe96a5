"""The devices that jax finds on this machine, asked in a process of its own: a driver that hangs must not hang this one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from jaxserve.runtime.environment import child_environment
from jaxserve.types import GPU_SHARE

TIMEOUT_S: Final = 60.0
_PROGRAM: Final = """
import json, jax
found = jax.devices()
limit = (found[0].memory_stats() or {}).get("bytes_limit")
print(json.dumps([len(found), found[0].platform, found[0].device_kind, limit, getattr(found[0], "compute_capability", "")]))
"""
_DEFAULTS: Final = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE)}
"""Variables with which a GPU reports what an engine could take, and with which nothing is taken."""


@dataclass(frozen=True, slots=True)
class FoundDevices:
    """Devices of one kind."""

    count: int
    platform: str
    kind: str
    limit_bytes: int | None
    """Memory of one device that its runtime hands out; None if it does not say, as on a CPU."""
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device."""


class NoDeviceError(Exception):
    """jax found no device. The text says why; `is_hanging` whether the driver did not answer."""

    def __init__(self, reason: str, *, is_hanging: bool) -> None:
        super().__init__(reason)
        self.is_hanging = is_hanging


def find_devices() -> FoundDevices:
    """Return the devices that an engine with this environment would find. Raises NoDeviceError."""
    command = [sys.executable, "-c", _PROGRAM]
    environment = {**_DEFAULTS, **child_environment()}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoDeviceError(f"jax found none within {TIMEOUT_S:g} s: the driver hangs", is_hanging=True) from None
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
        raise NoDeviceError(reason, is_hanging=False)
    count, platform, kind, limit, capability = json.loads(result.stdout.splitlines()[-1])
    major, _, minor = str(capability).partition(".")
    is_cuda = major.isdigit() and minor.isdigit()
    return FoundDevices(count, platform, kind, limit, (int(major), int(minor)) if is_cuda else None)
