"""The settings of each model of a server, from `--model NAME=MODEL` and `--model NAME=FILE.yaml`.

Common settings are those of flags, environment and file; a model's own file wins over them, since it says more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import config_from, values_of_file
from jaxserve.runtime.settings import BY_NAME, Value

_OWN_SECTIONS: Final = ("model", "cache", "tiers", "scheduler", "parallel", "compile", "structured", "images")
_OWN_SETTINGS: Final = ("tool_call_parser", "reasoning_parser")
"""Settings of other sections that a model may have for itself."""
_ONE_MODELS: Final = ("revision", "lora_modules", "chat_template", "kv_offload_dir", "kv_listen", "kv_peers")
"""Settings that cannot hold for several models."""


def configs_of_models(models: Sequence[str], common: Mapping[str, Value]) -> list[Config]:
    """Return the config of each model, with the same settings of the server. Raises ConfigError.

    models: `NAME=MODEL` or `NAME=FILE.yaml`; a single one needs no name. common: values that hold for all.
    """
    named = [_split(entry, needs_name=len(models) > 1) for entry in models]
    if len(named) > 1:
        _check_common(common)
        names = [name for name, _ in named]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"--model: two models have the name {twice[0]!r}")
    configs = [config_from({**common, **_own_values(name, source)}) for name, source in named]
    if len(configs) > 1:
        for (name, _), config in zip(named, configs, strict=True):
            if config.parallel.replicas > 1:
                raise ConfigError(f"--replicas {config.parallel.replicas} ({name}): not with several models (--model)")
    return configs


def _split(entry: str, *, needs_name: bool) -> tuple[str | None, str]:
    name, separator, source = (part.strip() for part in entry.partition("="))
    if separator and name and source and "," not in name:
        return name, source
    if not separator and name and not needs_name:
        return None, name
    raise ConfigError(f"--model {entry!r}: expected NAME=MODEL or NAME=FILE.yaml")


def _own_values(name: str | None, source: str) -> dict[str, Value]:
    """Return the values of one model: of its file, or its source alone."""
    own: dict[str, Value]
    if Path(source).suffix in (".yaml", ".yml"):
        own = values_of_file(Path(source))
        _check_file(source, own)
    else:
        own = {"model": source}
    return own if name is None else {**own, "served_model_name": name}


def _check_file(file: str, own: Collection[str]) -> None:
    if "model" not in own:
        raise ConfigError(f"{file}: `model` is missing: a GGUF file, a Hugging Face directory or a hub id")
    for name in own:
        if name == "served_model_name":
            raise ConfigError(f"{file}: `{name}`: the name is given by `--model NAME={file}`")
        if BY_NAME[name].section not in _OWN_SECTIONS and name not in _OWN_SETTINGS:
            raise ConfigError(f"{file}: `{name}` is a setting of the server, not of one of its models")


def _check_common(common: Mapping[str, Value]) -> None:
    if common.get("served_model_name") is not None:
        raise ConfigError("--served-model-name: several models have the names of `--model NAME=MODEL`")
    for name in ("api_processes", "num_hosts"):
        if common.get(name, 1) != 1:
            raise ConfigError(f"{BY_NAME[name].flag} {common[name]}: not with several models (--model)")
    for name in _ONE_MODELS:
        if common.get(name) is not None:
            raise ConfigError(
                f"{BY_NAME[name].flag}: belongs to one model: give it in the file of `--model NAME=FILE.yaml`"
            )
