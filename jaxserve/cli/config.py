"""`jaxserve config`: print the settings that `jaxserve serve` would have with the same flags, environment and file."""

from __future__ import annotations

import argparse

from jaxserve.cli.flags import add_flags, config_from_flags
from jaxserve.runtime.settings import SECTIONS, SETTINGS, format_value, value_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jaxserve serve`."""
    parser.add_argument("--changed", action="store_true", help="only settings that differ from their defaults")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line per setting, by section; secrets are masked. Returns 0."""
    config = config_from_flags(arguments)
    for section in SECTIONS:
        settings = [setting for setting in SETTINGS if setting.section == section]
        if arguments.changed:
            settings = [setting for setting in settings if value_of(config, setting) != setting.default]
        lines = [f"  {setting.name}: {format_value(setting, value_of(config, setting))}" for setting in settings]
        if lines:
            print("\n".join([f"{section}:", *lines]))
    return 0
