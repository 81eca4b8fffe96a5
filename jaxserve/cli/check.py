"""`jaxserve check FILE`: every mistake of a config file, with its line and a suggestion."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxserve.tools.config_check import file_mistakes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file."""
    parser.add_argument("file", metavar="FILE", help="YAML file as `jaxserve serve --config` takes it")


def run(arguments: argparse.Namespace) -> int:
    """Print the mistakes; returns 0 if there are none, else 1."""
    mistakes = file_mistakes(Path(arguments.file))
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    if not mistakes:
        print(f"{arguments.file}: fine")
    return 1 if mistakes else 0
