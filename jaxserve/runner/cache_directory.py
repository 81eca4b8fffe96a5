"""Where compiled programs are kept, and whether that place can be trusted.

Whoever can write the directory can run code in the engine (JAX unpickles what it stores), so it must belong to us,
or to root as in a container image, and nobody else may write to it.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

_LOG = logging.getLogger(__name__)

DEFAULT_DIRECTORY: Final = "~/.cache/jaxserve/programs"


def cache_directory(setting: str | None) -> Path | None:
    """The directory that `--compile-cache` means; None for `off`, and where there is no home to put it in."""
    if setting == "off":
        return None
    try:
        return Path(setting or DEFAULT_DIRECTORY).expanduser()
    except RuntimeError as error:
        _LOG.warning("compile cache is off: %s", error)
        return None


def trusted_directory(directory: Path) -> Path | None:
    """`directory`, made if need be (0700); None with a warning when it cannot be used."""
    fault = _fault_of(directory)
    if fault is not None:
        _LOG.warning("compile cache %s is off: %s", directory, fault)
        return None
    return directory


def _fault_of(directory: Path) -> str | None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return str(error)
    if not os.access(directory, os.R_OK | os.X_OK):
        return "no permission to read it"
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "the directory must belong to this user, or to root, and nobody else may write to it (mode 0700 or 0755)"
    return None
