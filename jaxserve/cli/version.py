"""`jaxserve version`: print the versions of jaxserve, jax and Python."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

from jaxserve import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # no options


def run(arguments: argparse.Namespace) -> int:
    """Print one line; returns 0."""
    del arguments
    print(f"jaxserve {__version__} (jax {metadata.version('jax')}, Python {platform.python_version()})")
    return 0
