"""Reads a YAML file of settings: the values of settings, and the models of a server. Every mistake is one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from jaxserve.errors import ConfigError
from jaxserve.runtime.settings import BY_NAME, SECTIONS, SETTINGS, Value, closest, parse_value
from jaxserve.yaml_values import yaml_loader

if TYPE_CHECKING:
    import yaml

MODELS_KEY: Final = "models"
"""The key below which several models stand, by name."""
MODELS_FORM: Final = "`NAME: MODEL`, `NAME: FILE.yaml`, or `NAME:` with the model's own settings below it"


BESIDE_MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": f"not beside `{MODELS_KEY}`, which names every model",
        "served_model_name": f"the models have the names of `{MODELS_KEY}`",
    }
)
"""Settings that a file with `models` cannot have, and why."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of a server, before its settings are checked."""

    name: str | None
    """The name that requests use; None for a single model that is named by its source."""
    source: str | Mapping[str, Value]
    """A model, the path of a YAML file with its own settings, or these settings."""
    origin: str
    """The place where it was given, for messages."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The content of one file."""

    values: dict[str, Value]
    """Values of settings, by name."""
    models: tuple[ModelEntry, ...] = ()
    """The models of `models:`, in their order; empty without the key."""


def read_config_file(file: Path) -> ConfigFile:
    """Read a file that may name several models. Raises ConfigError."""
    content = dict(_read_yaml(file))
    has_models, models = MODELS_KEY in content, content.pop(MODELS_KEY, None)
    values = _settings_of(content, str(file), "")
    if not has_models:
        return ConfigFile(values)
    for name in ("model", "served_model_name"):
        if name in values:
            raise ConfigError(f"{file}: `{name}`: {BESIDE_MODELS[name]}")
    return ConfigFile(values, _entries(models, file))


def values_of_file(file: Path) -> dict[str, Value]:
    """Return the values of a YAML file with the settings of one model. Raises ConfigError."""
    content = _read_yaml(file)
    if MODELS_KEY in content:
        raise ConfigError(f"{file}: `{MODELS_KEY}`: a model's own file has the settings of one model")
    return _settings_of(content, str(file), "")


def name_mistake(name: str) -> str | None:
    """Return what is wrong with the name of a model; None if it can be one."""
    if name.strip() != name or not name or "," in name or "=" in name:
        return f"the name of a model, without `,`, `=` and outer spaces, expected instead of {name!r}"
    return None


def _entries(models: object, file: Path) -> tuple[ModelEntry, ...]:
    if not isinstance(models, Mapping) or not models:
        raise ConfigError(f"{file}: `{MODELS_KEY}`: expected lines of {MODELS_FORM}")
    entries = []
    for key, raw in models.items():
        name, place = str(key), f"{MODELS_KEY}.{key}"
        if problem := name_mistake(name):
            raise ConfigError(f"{file}: `{MODELS_KEY}`: {problem}")
        if isinstance(raw, Mapping):
            source: str | Mapping[str, Value] = _settings_of(raw, str(file), f"{place}.")
        elif isinstance(raw, str) and raw:
            source = raw
        else:
            raise ConfigError(f"{file}: `{place}` {raw!r}: expected {MODELS_FORM}")
        entries.append(ModelEntry(name, source, f"{file}: {place}"))
    return tuple(entries)


def _settings_of(content: Mapping[Any, Any], file: str, prefix: str) -> dict[str, Value]:
    """Return the values of a mapping of settings, flat or by section. prefix: the path of the mapping in the file."""
    values: dict[str, Value] = {}
    for key, raw in content.items():
        if key in SECTIONS and isinstance(raw, Mapping | None):
            entries = [(f"{prefix}{key}.{name}", str(name), value, key) for name, value in (raw or {}).items()]
        else:
            entries = [(f"{prefix}{key}", str(key), raw, None)]
        for path, written, value, section in entries:
            name = written.replace("-", "_")
            setting = BY_NAME.get(name)
            if setting is None or (section is not None and setting.section != section):
                candidates = [s.name for s in SETTINGS if section in (None, s.section)]
                hint = (
                    "; a section's settings stand below it"
                    if section is None and written in SECTIONS
                    else closest(name, candidates)
                )
                raise ConfigError(f"{file}: unknown key `{path}`{hint}")
            if name in values:
                raise ConfigError(f"{file}: `{prefix}{name}` is given twice")
            values[name] = parse_value(setting, value, f"{file}: {path}")
    return values


def _read_yaml(file: Path) -> Mapping[Any, Any]:
    import yaml

    class Loader(yaml_loader()):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(str(key.value) for key, _ in node.value)
            if twice := [key for key, count in keys.items() if count > 1]:
                raise ConfigError(f"{file}: `{twice[0]}` is given twice")
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: not YAML: {' '.join(str(error).split())}") from error
    if content is None:  # nothing but comments
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"--config {file}: expected `key: value` lines, found {type(content).__name__}")
    return content
