"""All mistakes of a config file at once; a start stops at the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import load_config
from jaxserve.runtime.settings import BY_NAME, SECTIONS, SETTINGS, closest, parse_value


def file_mistakes(file: Path) -> list[str]:
    """Return one line per mistake, `FILE:LINE: KEY: what is wrong`. Raises ConfigError for a file that cannot be read."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        return [f"{file}:{line}: not YAML: {error.problem}"]
    except yaml.YAMLError as error:
        return [f"{file}:1: not YAML: {' '.join(str(error).split())}"]
    if root is None:  # nothing but comments
        return []
    if not isinstance(root, yaml.MappingNode):
        return [f"{file}:1: expected `key: value` lines"]
    found = [f"{file}:{line}: {text}" for line, text in _mistakes(root)]
    return found or _whole(file)


def _mistakes(root: yaml.MappingNode) -> Iterator[tuple[int, str]]:
    seen: dict[str, int] = {}
    for key, value in root.value:
        if key.value in SECTIONS and isinstance(value, yaml.MappingNode):
            for inner, inner_value in value.value:
                yield from _entry(inner, inner_value, key.value, seen)
        else:
            yield from _entry(key, value, None, seen)


def _entry(key: yaml.Node, value: yaml.Node, section: str | None, seen: dict[str, int]) -> Iterator[tuple[int, str]]:
    """Yield what is wrong with one setting; `seen` has the lines of those before it."""
    line, written = key.start_mark.line + 1, str(key.value)
    name = written.replace("-", "_")
    setting = BY_NAME.get(name)
    if written in SECTIONS and setting is None:
        yield line, f"{written}: a section's settings stand below it, indented"
        return
    if setting is None or (section is not None and setting.section != section):
        elsewhere = f"; it belongs to `{setting.section}`" if setting is not None else ""
        yield line, f"{written}: unknown key{elsewhere or closest(name, [one.name for one in SETTINGS])}"
        return
    if name in seen:
        yield line, f"{written}: given twice, first in line {seen[name]}"
        return
    seen[name] = line
    try:
        loader = yaml.SafeLoader("")
        parse_value(setting, loader.construct_document(value), written)
    except ConfigError as error:
        yield line, str(error)
    except yaml.YAMLError as error:
        yield line, f"{written}: {' '.join(str(error).split())}"


def _whole(file: Path) -> list[str]:
    """Return the mistake that only all settings together show."""
    try:
        load_config(file=file, flags={})
    except ConfigError as error:
        text = str(error)
        return [] if text.startswith("no model given") else [text]
    return []
