"""Finds the directory of compiled programs and checks that it can be trusted.

A user who can write to the directory can run code in the engine (JAX unpickles what it stores), so it must belong to this
user, or to root as in a container image, and no other user may write to it.
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
    """Return the directory of `--compile-cache`; None for `off`, and if the user has no home directory."""
    if setting == "off":
        return None
    try:
        return Path(setting or DEFAULT_DIRECTORY).expanduser()
    except RuntimeError as error:
        _LOG.warning("compile cache is off: %s", error)
        return None


def trusted_directory(directory: Path) -> Path | None:
    """Return `directory`, created if it is missing (0700); None with a warning if it cannot be used."""
    problem = _problem(directory)
    if problem is not None:
        _LOG.warning("compile cache %s is off: %s", directory, problem)
        return None
    return directory


def _problem(directory: Path) -> str | None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return str(error)
    if not os.access(directory, os.R_OK | os.X_OK):
        return "no permission to read it"
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            "the directory must belong to this user, or to root, and no other user may write to it (mode 0700 or 0755)"
        )
    return None
