"""`jaxserve config`: print the settings that `jaxserve serve` would have with the same flags, environment and file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from jaxserve.cli.flags import add_flags, add_model_flag, configs_from_flags
from jaxserve.config import Config
from jaxserve.runtime.models.config_file import MODELS_KEY
from jaxserve.runtime.settings import SECTIONS, SETTINGS, Setting, format_value, value_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `jaxserve serve`."""
    parser.add_argument("--changed", action="store_true", help="only settings that differ from their defaults")
    add_model_flag(parser)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line per setting, by section, and for several models what each has for itself; secrets are masked. Returns 0."""
    configs = configs_from_flags(arguments)
    common = [setting for setting in SETTINGS if len({value_of(config, setting) for config in configs}) == 1]

    def is_shown(config: Config, setting: Setting) -> bool:
        return not arguments.changed or value_of(config, setting) != setting.default

    for section in SECTIONS:
        _show(section, configs[0], (setting for setting in common if setting.section == section), is_shown)
    if len(configs) > 1:
        print(f"{MODELS_KEY}:")
        own = [setting for setting in SETTINGS if setting not in common and setting.name != "served_model_name"]
        for config in configs:
            _show(str(config.model.served_model_name), config, own, is_shown, indent="  ")
    return 0


def _show(
    title: str,
    config: Config,
    settings: Iterable[Setting],
    is_shown: Callable[[Config, Setting], bool],
    indent: str = "",
) -> None:
    """Print the settings below a title, or nothing without any."""
    shown = [setting for setting in settings if is_shown(config, setting)]
    lines = [f"{indent}  {setting.name}: {format_value(setting, value_of(config, setting))}" for setting in shown]
    if lines:
        print("\n".join([f"{indent}{title}:", *lines]))
