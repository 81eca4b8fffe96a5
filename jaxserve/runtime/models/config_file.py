"""Reads a YAML file of settings: the values of settings, the models of a server, and each mistake with its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jaxserve.errors import ConfigError
from jaxserve.runtime.settings import BY_NAME, SECTIONS, SETTINGS, Value, closest, parse_value
from jaxserve.yaml_values import yaml_loader

MODELS_KEY: Final = "models"
"""The key below which several models stand, by name."""
MODELS_FORM: Final = "`NAME: MODEL`, `NAME: FILE.yaml`, or `NAME:` with the model's own settings below it"
_BESIDE_MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": f"not beside `{MODELS_KEY}`, which names every model",
        "served_model_name": f"the models have the names of `{MODELS_KEY}`",
    }
)
"""Settings that a file with `models` cannot have, and why."""
FILE_SUFFIXES: Final = (".yaml", ".yml")
"""Suffixes of files with the settings of one model."""
_OWN_SECTIONS: Final = ("model", "cache", "tiers", "scheduler", "parallel", "compile", "structured", "images")
_OWN_SETTINGS: Final = ("tool_call_parser", "reasoning_parser")
"""Settings of other sections that a model may have for itself."""
_MERGE: Final = "tag:yaml.org,2002:merge"
_NULL: Final = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of a server, before its settings are checked."""

    name: str | None
    """The name that requests use; None for a single model that is named by its source."""
    source: str | Mapping[str, Value]
    """A model, the path of a YAML file with its own settings, or these settings."""
    origin: str
    """The place where it was given, for messages."""
    line: int = 0
    """The line of its file."""


@dataclass(slots=True)
class ConfigFile:
    """The content of one file."""

    file: Path = Path()
    values: dict[str, Value] = field(default_factory=dict)
    """Values of settings, by name; None also for a wrong one."""
    lines: dict[str, int] = field(default_factory=dict)
    """Lines of settings, by name."""
    models: list[ModelEntry] = field(default_factory=list)
    """The models of `models:`, in their order; empty without the key."""
    mistakes: list[tuple[int, str]] = field(default_factory=list)
    """Lines, and what is wrong there: `KEY: what is wrong`."""

    def fail(self, key: Any, text: str) -> None:
        """Add a mistake in the line of a key."""
        self.mistakes.append((_line(key), text))

    @property
    def messages(self) -> list[str]:
        """Return one line per mistake, `FILE:LINE: KEY: what is wrong`, by their lines."""
        return [f"{self.file}:{line}: {text}" for line, text in sorted(self.mistakes, key=lambda one: one[0])]


def read_config_file(file: Path) -> ConfigFile:
    """Read a file that may name several models. Raises ConfigError for its first mistake."""
    return _without_mistakes(parse_config_file(file))


def values_of_file(file: Path) -> dict[str, Value]:
    """Return the values of a YAML file with the settings of one model. Raises ConfigError for its first mistake."""
    return _without_mistakes(parse_own_file(file)).values


def _without_mistakes(found: ConfigFile) -> ConfigFile:
    if found.mistakes:
        raise ConfigError(found.messages[0])
    return found


def parse_config_file(file: Path) -> ConfigFile:
    """Read a file that may name several models, and its mistakes. Raises ConfigError for a file that cannot be read."""
    found = ConfigFile(file)
    root = _root(found)
    _settings(found, [entry for entry in root if entry[0].value != MODELS_KEY], "")
    named = [entry for entry in root if entry[0].value == MODELS_KEY]
    for key, node in named[:1]:
        if node.id == "mapping" and node.value:
            _models(found, node)
        else:
            found.fail(key, f"{MODELS_KEY}: expected lines of {MODELS_FORM}")
        found.mistakes += [
            (found.lines[name], f"{name}: {why}") for name, why in _BESIDE_MODELS.items() if name in found.lines
        ]
    for key, _ in named[1:]:
        found.fail(key, f"{MODELS_KEY}: given twice, first in line {_line(named[0][0])}")
    return found


def parse_own_file(file: Path) -> ConfigFile:
    """Read a file with the settings of one model, and its mistakes. Raises ConfigError for a file that cannot be read."""
    found = ConfigFile(file)
    root = _root(found)
    key = next((key for key, _ in root if key.value == MODELS_KEY), None)
    if key is not None:
        found.fail(key, f"{MODELS_KEY}: a model's own file has the settings of one model")
    elif not found.mistakes:
        _own_settings(found, root, "", 1)
    return found


def name_mistake(name: str) -> str | None:
    """Return what is wrong with the name of a model; None if it can be one."""
    if name.strip() != name or not name or "," in name or "=" in name:
        return f"the name of a model, without `,`, `=` and outer spaces, expected instead of {name!r}"
    return None


def _models(found: ConfigFile, models: Any) -> None:
    lines: dict[str, int] = {}
    for key, node in _entries(found, models):
        name = str(key.value)
        path = f"{MODELS_KEY}.{name}"
        if name in lines:
            found.fail(key, f"{path}: given twice, first in line {lines[name]}")
            continue
        lines[name] = _line(key)
        if problem := name_mistake(name):
            found.fail(key, f"{MODELS_KEY}: {problem}")
        source: str | Mapping[str, Value] = ""
        if node.id == "mapping":
            own = ConfigFile(mistakes=found.mistakes)
            _own_settings(own, _entries(found, node), f"{path}.", _line(key))
            source = own.values
        elif isinstance(raw := _value(node, path), str) and raw:
            source = raw
        else:
            found.fail(key, f"{path} {raw!r}: expected {MODELS_FORM}")
        found.models.append(ModelEntry(name, source, f"{found.file}: {path}", _line(key)))


def _own_settings(found: ConfigFile, entries: list[tuple[Any, Any]], prefix: str, line: int) -> None:
    """Add the settings of one model. prefix: the path of the mapping that has them, with a dot; line: where a missing model is reported."""
    _settings(found, entries, prefix)
    for name, own_line in found.lines.items():
        if name == "served_model_name":
            problem = f"the name is given by `--model NAME=...`, or is the key below `{MODELS_KEY}`"
        elif BY_NAME[name].section not in _OWN_SECTIONS and name not in _OWN_SETTINGS:
            problem = "a setting of the server, not of one of its models"
        else:
            continue
        found.mistakes.append((own_line, f"{prefix}{name}: {problem}"))
    if "model" not in found.lines:
        found.mistakes.append((line, f"{prefix}model: missing: {BY_NAME['model'].help}"))


def _settings(found: ConfigFile, entries: list[tuple[Any, Any]], prefix: str) -> None:
    """Add the settings of a mapping, flat or by section. prefix: the path of the mapping."""
    for key, node in entries:
        if key.value not in SECTIONS or (node.id != "mapping" and node.tag != _NULL):
            _setting(found, key, node, None, prefix)
        elif node.id == "mapping":
            for inner, value in _entries(found, node):
                _setting(found, inner, value, key.value, prefix)


def _setting(found: ConfigFile, key: Any, node: Any, section: str | None, prefix: str) -> None:
    written = str(key.value)
    name, path = written.replace("-", "_"), f"{prefix}{written}"
    setting = BY_NAME.get(name)
    if written in SECTIONS and setting is None:
        found.fail(key, f"{path}: a section's settings stand below it, indented")
    elif setting is None or (section is not None and setting.section != section):
        known = [one.name for one in SETTINGS] + ([] if prefix else [MODELS_KEY])
        elsewhere = f"; it belongs to `{setting.section}`" if setting is not None else ""
        found.fail(key, f"{path}: unknown key{elsewhere or closest(name, known)}")
    elif name in found.lines:
        found.fail(key, f"{path}: given twice, first in line {found.lines[name]}")
    else:
        found.lines[name], found.values[name] = _line(key), None
        try:
            found.values[name] = parse_value(setting, _value(node, path), path)
        except ConfigError as error:
            found.fail(key, str(error))


def _root(found: ConfigFile) -> list[tuple[Any, Any]]:
    """Return the entries of a whole file; none if it has none or is wrong. Raises ConfigError for a file that cannot be read."""
    import yaml

    try:
        root: Any = yaml.compose(found.file.read_text(encoding="utf-8"), yaml_loader())
    except OSError as error:
        raise ConfigError(f"{found.file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{found.file}: not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = 1 if mark is None else mark.line + 1
        found.mistakes.append((line, f"not YAML: {problem or ' '.join(str(error).split())}"))
        return []
    if root is None:  # nothing but comments
        return []
    if root.id != "mapping":
        found.mistakes.append((1, "expected `key: value` lines"))
        return []
    return _entries(found, root)


def _entries(found: ConfigFile, node: Any) -> list[tuple[Any, Any]]:
    """Return the entries of a mapping, after those that `<<` merges into it and that are not its own."""
    import yaml

    for key, _ in node.value:
        if key.id != "scalar":
            found.fail(key, f"expected a key that is a text, found a {key.id}")
    texts = [(key, value) for key, value in node.value if key.id == "scalar"]
    own = [(key, value) for key, value in texts if key.tag != _MERGE]
    merged = yaml.MappingNode(node.tag, [(key, value) for key, value in texts if key.tag == _MERGE])
    try:
        yaml.SafeLoader("").flatten_mapping(merged)
    except yaml.YAMLError:  # the merge key stays, as an unknown one
        return texts
    names = {key.value for key, _ in own}
    others = {key.value: (key, value) for key, value in merged.value if key.id == "scalar" and key.value not in names}
    return [*others.values(), *own]


def _value(node: Any, path: str) -> Any:
    """Return the value of a node. Raises ConfigError with the path of its key."""
    import yaml

    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error


def _line(key: Any) -> int:
    line: int = key.start_mark.line
    return line + 1
