"""All mistakes of a config file at once; a start stops at the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import config_from, load_settings
from jaxserve.runtime.models.config_file import BESIDE_MODELS, MODELS_FORM, MODELS_KEY, name_mistake
from jaxserve.runtime.models.model_configs import common_setting_mistake, configs_of_models, own_setting_mistake
from jaxserve.runtime.settings import BY_NAME, SECTIONS, SETTINGS, Value, closest, parse_value
from jaxserve.yaml_values import yaml_loader

_MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Given:
    """A setting that a file gives."""

    line: int
    value: Value
    """None also if the value is wrong."""


def file_mistakes(file: Path) -> list[str]:
    """Return one line per mistake, `FILE:LINE: KEY: what is wrong`. Raises ConfigError for a file that cannot be read."""
    try:
        root = _compose(file)
    except NotYamlError as error:
        return [str(error)]
    if root is None:  # nothing but comments
        return []
    if not isinstance(root, yaml.MappingNode):
        return [f"{file}:1: expected `key: value` lines"]
    found = [f"{file}:{line}: {text}" for line, text in sorted(_mistakes(root), key=lambda one: one[0])]
    return found or _whole(file)


class NotYamlError(ConfigError):
    """A file is not YAML. The text names its line."""


def _compose(file: Path) -> yaml.Node | None:
    """Return the nodes of a file; None if it has none. Raises ConfigError for a file that cannot be read or is not YAML."""
    try:
        root: yaml.Node | None = yaml.compose(file.read_text(encoding="utf-8"), yaml_loader())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise NotYamlError(f"{file}:{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise NotYamlError(f"{file}:1: not YAML: {' '.join(str(error).split())}") from error
    return root


def _mistakes(root: yaml.MappingNode) -> Iterator[tuple[int, str]]:
    seen: dict[str, Given] = {}
    models: list[tuple[yaml.Node, yaml.Node]] = []
    for key, value in _entries(root):
        if key.value != MODELS_KEY:
            yield from _settings(key, value, "", seen)
        elif models:
            yield (
                key.start_mark.line + 1,
                f"{MODELS_KEY}: given twice, first in line {models[0][0].start_mark.line + 1}",
            )
        else:
            models.append((key, value))
    for key, value in models:
        yield from _models(key, value)
        yield from _beside_models(seen, len(_entries(value)) if isinstance(value, yaml.MappingNode) else 0)


def _models(key: yaml.Node, models: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with the models of a server."""
    if not isinstance(models, yaml.MappingNode) or not models.value:
        yield key.start_mark.line + 1, f"{MODELS_KEY}: expected lines of {MODELS_FORM}"
        return
    lines: dict[str, int] = {}
    for name_node, node in _entries(models):
        name, line = str(name_node.value), name_node.start_mark.line + 1
        path = f"{MODELS_KEY}.{name}"
        if name in lines:
            yield line, f"{path}: given twice, first in line {lines[name]}"
            continue
        lines[name] = line
        if problem := name_mistake(name):
            yield line, f"{MODELS_KEY}: {problem}"
        if isinstance(node, yaml.MappingNode):
            yield from _own_settings(node, f"{path}.", line)
        elif not isinstance(raw := _value(node), str) or not raw:
            yield line, f"{path} {raw!r}: expected {MODELS_FORM}"
        elif Path(raw).suffix in (".yaml", ".yml"):
            yield from ((line, f"{path}: {mistake}") for mistake in _own_file_mistakes(Path(raw)))


def _own_settings(node: yaml.MappingNode, prefix: str, line: int) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with the settings of one model.

    prefix: the path of the mapping that has them, with a dot; line: where a missing model is reported.
    """
    seen: dict[str, Given] = {}
    for key, value in _entries(node):
        yield from _settings(key, value, prefix, seen)
    for name, given in seen.items():
        if problem := own_setting_mistake(name):
            yield given.line, f"{prefix}{name}: {problem}"
    if "model" not in seen:
        yield line, f"{prefix}model: missing: {BY_NAME['model'].help}"


def _own_file_mistakes(file: Path) -> list[str]:
    """Return the mistakes of a file with the settings of one model."""
    try:
        root = _compose(file)
    except ConfigError as error:
        return [str(error)]
    if not isinstance(root, yaml.MappingNode):
        return [f"{file}:1: expected `key: value` lines"]
    for key, _ in root.value:
        if key.value == MODELS_KEY:
            return [f"{file}:{key.start_mark.line + 1}: {MODELS_KEY}: a model's own file has the settings of one model"]
    return [f"{file}:{line}: {text}" for line, text in sorted(_own_settings(root, "", 1))]


def _beside_models(common: Mapping[str, Given], num_models: int) -> Iterator[tuple[int, str]]:
    """Yield what cannot stand beside `models`."""
    for name, given in common.items():
        if name in BESIDE_MODELS:
            yield given.line, f"{name}: {BESIDE_MODELS[name]}"
        elif num_models > 1 and (problem := common_setting_mistake(name, given.value)):
            yield given.line, f"{name}: {problem}"


def _settings(key: yaml.Node, value: yaml.Node, prefix: str, seen: dict[str, Given]) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with a setting, or with those of a section. prefix: the path of the mapping that has it."""
    if key.value in SECTIONS and isinstance(value, yaml.MappingNode):
        for inner, inner_value in _entries(value):
            yield from _entry(inner, inner_value, key.value, prefix, seen)
    else:
        yield from _entry(key, value, None, prefix, seen)


def _entry(
    key: yaml.Node, value: yaml.Node, section: str | None, prefix: str, seen: dict[str, Given]
) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with one setting; `seen` has those before it."""
    line, written = key.start_mark.line + 1, str(key.value)
    name, path = written.replace("-", "_"), f"{prefix}{written}"
    setting = BY_NAME.get(name)
    if written in SECTIONS and setting is None:
        yield line, f"{path}: a section's settings stand below it, indented"
        return
    if setting is None or (section is not None and setting.section != section):
        known = [one.name for one in SETTINGS] + ([] if prefix else [MODELS_KEY])
        elsewhere = f"; it belongs to `{setting.section}`" if setting is not None else ""
        yield line, f"{path}: unknown key{elsewhere or closest(name, known)}"
        return
    if name in seen:
        yield line, f"{path}: given twice, first in line {seen[name].line}"
        return
    seen[name] = Given(line, None)
    try:
        seen[name] = Given(line, parse_value(setting, _value(value), path))
    except ConfigError as error:
        yield line, str(error)
    except yaml.YAMLError as error:
        yield line, f"{path}: {' '.join(str(error).split())}"


def _entries(node: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    """Return the entries of a mapping, after those that `<<` merges into it and that are not its own.

    Keys that are no texts are left out: loading the file reports them.
    """
    own = [(key, value) for key, value in node.value if key.tag != _MERGE and isinstance(key, yaml.ScalarNode)]
    merged = yaml.MappingNode(node.tag, [(key, value) for key, value in node.value if key.tag == _MERGE])
    try:
        yaml.SafeLoader("").flatten_mapping(merged)
    except yaml.YAMLError:  # the merge key stays, as an unknown one
        return [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    names = {key.value for key, _ in own}
    others = {
        key.value: (key, value)
        for key, value in merged.value
        if isinstance(key, yaml.ScalarNode) and key.value not in names
    }
    return [*others.values(), *own]


def _value(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_document(node)


def _whole(file: Path) -> list[str]:
    """Return the mistake that only all settings together show."""
    try:
        given = load_settings({}, {}, file)
        if given.models:
            configs_of_models(given.models, given.values)
        else:
            config_from({"model": "any", **given.values})
    except ConfigError as error:
        return [str(error)]
    return []
