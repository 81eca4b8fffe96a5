"""The settings of each model of a server, from `--model NAME=MODEL`, `--model NAME=FILE.yaml`, or `models:` of a file.

Common settings are those of flags, environment and file; a model's own settings win over them, since they say more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import config_from
from jaxserve.runtime.models.config_file import FILE_SUFFIXES, ModelEntry, name_mistake, values_of_file
from jaxserve.runtime.settings import BY_NAME, Value

_ONE_MODELS: Final = ("revision", "lora_modules", "chat_template", "mmproj", "kv_offload_dir", "kv_listen", "kv_peers")
"""Settings that cannot hold for several models."""
_ONE_EACH: Final = ("api_processes", "num_hosts", "replicas")
"""Settings that can only be 1 with several models."""


def entries_of_flags(words: Sequence[str]) -> list[ModelEntry]:
    """Return the models of `--model`: `NAME=MODEL` or `NAME=FILE.yaml`; a single one needs no name. Raises ConfigError."""
    return [_entry(word, needs_name=len(words) > 1) for word in words]


def configs_of_models(entries: Sequence[ModelEntry], common: Mapping[str, Value]) -> list[Config]:
    """Return the config of each model, with the same settings of the server. Raises ConfigError.

    common: values that hold for all.
    """
    if any(entry.name is not None for entry in entries) and common.get("served_model_name") is not None:
        raise ConfigError("--served-model-name: each model has the name before its `=`, or its key below `models`")
    if len(entries) > 1:
        _check_common(common)
        names = [entry.name for entry in entries]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"--model: two models have the name {twice[0]!r}")
    configs = [_config(entry, common) for entry in entries]
    if len(configs) > 1:
        for entry, config in zip(entries, configs, strict=True):
            if config.parallel.replicas > 1:
                raise ConfigError(f"--replicas {config.parallel.replicas} ({entry.name}): not with several models")
    return configs


def model_name(config: Config) -> str:
    """Return the name under which a model is shown: the first that requests use, or its path."""
    return (config.model.served_model_name or config.model.model).split(",")[0]


def common_setting_mistake(name: str, value: Value) -> str | None:
    """Return why `name` cannot have the value for several models; None if it can."""
    if name in _ONE_EACH and value not in (None, 1):
        return "not with several models (--model)"
    if name in _ONE_MODELS and value is not None:
        return "belongs to one model: give it in the file of `--model NAME=FILE.yaml`, or below the model's name in `models`"
    return None


def _entry(word: str, *, needs_name: bool) -> ModelEntry:
    name, separator, source = (part.strip() for part in word.partition("="))
    if separator and source and name_mistake(name) is None:
        return ModelEntry(name, source, f"--model {word}")
    if not separator and name and not needs_name:
        return ModelEntry(None, name, f"--model {word}")
    raise ConfigError(f"--model {word!r}: expected NAME=MODEL or NAME=FILE.yaml")


def _config(entry: ModelEntry, common: Mapping[str, Value]) -> Config:
    values = {**common, **_own_values(entry)}
    try:
        return config_from(values)
    except ConfigError as error:
        raise ConfigError(str(error) if entry.name is None else f"{entry.name}: {error}") from error


def _own_values(entry: ModelEntry) -> dict[str, Value]:
    """Return the values of one model: its own settings, or its source alone."""
    own: Mapping[str, Value] = {"model": entry.source} if isinstance(entry.source, str) else entry.source
    if isinstance(entry.source, str) and Path(entry.source).suffix in FILE_SUFFIXES:
        own = values_of_file(Path(entry.source))
    return {**own} if entry.name is None else {**own, "served_model_name": entry.name}


def _check_common(common: Mapping[str, Value]) -> None:
    for name, value in common.items():
        if problem := common_setting_mistake(name, value):
            shown = f" {value}" if name in _ONE_EACH else ""
            raise ConfigError(f"{BY_NAME[name].flag}{shown}: {problem}")
