"""All mistakes of a config file at once; a start stops at the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import config_from
from jaxserve.runtime.models.config_file import FILE_SUFFIXES, ConfigFile, parse_config_file, parse_own_file
from jaxserve.runtime.models.model_configs import common_setting_mistake, configs_of_models


def file_mistakes(file: Path) -> list[str]:
    """Return one line per mistake, `FILE:LINE: KEY: what is wrong`. Raises ConfigError for a file that cannot be read."""
    found = parse_config_file(file)
    found.mistakes += _of_several_models(found)
    return found.messages or _whole(found)


def _of_several_models(found: ConfigFile) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with the models' own files, and what cannot hold for several models."""
    for entry in found.models:
        if isinstance(entry.source, str) and Path(entry.source).suffix in FILE_SUFFIXES:
            try:
                mistakes = parse_own_file(Path(entry.source)).messages
            except ConfigError as error:
                mistakes = [str(error)]
            yield from ((entry.line, f"models.{entry.name}: {mistake}") for mistake in mistakes)
    for name, value in found.values.items() if len(found.models) > 1 else ():
        if problem := common_setting_mistake(name, value):
            yield found.lines[name], f"{name}: {problem}"


def _whole(found: ConfigFile) -> list[str]:
    """Return the mistake that only all settings together show."""
    try:
        if found.models:
            configs_of_models(found.models, found.values)
        else:
            config_from({"model": "any", **found.values})
    except ConfigError as error:
        return [str(error)]
    return []
