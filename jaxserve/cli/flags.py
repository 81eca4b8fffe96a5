"""Command-line flags of the settings, made from the table of `runtime.settings`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import CONFIG_FILE_VARIABLE, config_of_one_model, load_settings_here
from jaxserve.runtime.models.model_configs import configs_of_models, entries_of_flags
from jaxserve.runtime.settings import BY_NAME, SECTIONS, SETTINGS, Setting, format_value, section_class

_METAVARS = {"integer": "N", "number": "X", "bytes": "SIZE", "json": "JSON", "text": "TEXT", "path": "PATH"}


def add_flags(parser: argparse.ArgumentParser, sections: Sequence[str] = SECTIONS) -> None:
    """Add one flag per setting of `sections`, grouped by section, plus `MODEL` and `--config`.

    Values stay text until `config_from_flags` reads them. Settings of other sections come from environment and file.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", help=BY_NAME["model"].help)
    parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file of settings, by section or flat (env: {CONFIG_FILE_VARIABLE})"
    )
    for section in sections:
        summary = (section_class(section).__doc__ or "").split(".")[0]
        group = parser.add_argument_group(f"{section}: {summary}")
        for setting in SETTINGS:
            if setting.section == section and setting.name != "model":
                _add_flag(group, setting)


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, for the commands that take several models."""
    parser.add_argument(
        "--model",
        action="append",
        dest="models",
        metavar="NAME=MODEL",
        help="several models, an engine each, instead of MODEL: give it once for each, with a name and a model as "
        "above, or a YAML file with the model's own settings, which win over the common ones (NAME=FILE.yaml); in the file "
        "of --config they stand below `models:`",
    )


def configs_from_flags(arguments: argparse.Namespace) -> list[Config]:
    """Return the config of each model: of `--model`, of the file's `models`, or of the single one. Raises ConfigError."""
    if arguments.models is not None and arguments.model is not None:
        raise ConfigError(f"{arguments.model}: give MODEL or --model, not both")
    given = load_settings_here(_given_flags(arguments), arguments.config)
    entries = given.models if arguments.models is None else entries_of_flags(arguments.models)
    return configs_of_models(entries, given.values) if entries else [config_of_one_model(given)]


def config_from_flags(arguments: argparse.Namespace) -> Config:
    """Return the config of parsed flags, this process's environment and the file they name. Raises ConfigError."""
    return config_of_one_model(load_settings_here(_given_flags(arguments), arguments.config))


def output_folder(name: str, given: str | None) -> Path:
    """Return the folder that a command fills. name: of the argument. Raises ConfigError."""
    if not given:
        raise ConfigError(f"{name} is missing: the folder to write")
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise ConfigError(f"{name} {given}: its `~` stands for no home directory") from None


def _given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in BY_NAME and value is not None}


def _add_flag(group: Any, setting: Setting) -> None:
    default = "" if setting.default is None else f" (default: {format_value(setting, setting.default)})"
    text = (setting.help + default).replace("%", "%%")
    if setting.kind == "switch":
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else _METAVARS[setting.kind]
    group.add_argument(setting.flag, metavar=metavar, default=None, help=text)
