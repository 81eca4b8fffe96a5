"""The settings of `config/` as a table, and the parsing of their values.

Flags, environment variables, file keys and the reference page derive from `SETTINGS`: a new setting is a new field of a
config dataclass.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.foreign_settings import advice_for_name
from jaxserve.yaml_values import integer, switch

Kind = Literal["text", "integer", "number", "switch", "choice", "bytes", "json", "path"]
Value = str | int | float | bool | None

ENVIRONMENT_PREFIX = "JAXSERVE_"
BYTE_UNITS: Mapping[str, int] = types.MappingProxyType(
    {
        "": 1,
        "B": 1,
        **{f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)},
        **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    }
)
_KINDS: Mapping[type, Kind] = types.MappingProxyType({str: "text", int: "integer", float: "number", bool: "switch"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One field of one section of `Config`."""

    section: str
    name: str
    kind: Kind
    choices: tuple[str, ...]
    default: Value
    is_optional: bool
    is_secret: bool
    help: str
    least: float | None
    most: float | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def limits(self) -> str:
        """The allowed values in words; empty for free text."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "switch":
            return "true or false"
        noun = {
            "integer": "an integer",
            "number": "a number",
            "bytes": "a size like 512MiB or 2GiB",
            "json": "a JSON object",
        }.get(self.kind, "")
        limits = (("at least", self.least), ("at most", self.most))
        bounds = [f"{word} {bound:.15g}" for word, bound in limits if bound is not None]
        return ", ".join(part for part in (noun, " and ".join(bounds)) if part)


def declared_settings() -> tuple[Setting, ...]:
    """Return the setting of every field of every section, in the order of declaration."""
    return tuple(
        declared_setting(section.name, field, hints[field.name])
        for section in dataclasses.fields(Config)
        for hints in (typing.get_type_hints(section_class(section.name)),)
        for field in dataclasses.fields(section_class(section.name))
    )


def section_class(section: str) -> Any:
    """Return the dataclass of a section of `Config`."""
    return typing.get_type_hints(Config)[section]


def parse_value(setting: Setting, raw: object, source: str) -> Value:
    """Return the value of `raw`: text, or a value of Python.

    Raises ConfigError with `source` (the flag, variable or file key), the value and the allowed values.
    """
    if raw is None and setting.is_optional:
        return None
    try:
        value: Value = _PARSERS[setting.kind](raw)
        if setting.kind == "choice" and value not in setting.choices:
            raise ValueError
        if isinstance(value, int | float) and not isinstance(value, bool):
            least, most = setting.least, setting.most
            if (least is not None and value < least) or (most is not None and value > most):
                raise ValueError
    except (ValueError, OverflowError, RecursionError):
        raise _rejected(setting, raw, source) from None
    return value


def format_value(setting: Setting, value: Value) -> str:
    """Return a value as text for people; secrets are masked, bytes as short as is exact (2GiB, 512MiB, 1000)."""
    if value is None:
        return "none"
    if setting.is_secret:
        return "***"
    if setting.kind == "bytes" and isinstance(value, int) and value:
        unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if value % BYTE_UNITS[unit] == 0), "")
        return f"{value // BYTE_UNITS[unit]}{unit}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def declared_setting(section: str, field: dataclasses.Field[Any], hint: Any) -> Setting:
    """Return the setting that a field of type `hint` declares."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (inner,) = [member for member in members if member is not type(None)]
    choices = typing.get_args(inner) if typing.get_origin(inner) is Literal else _registered_choices(field)
    kind: Kind = "choice" if choices else _KINDS[inner]
    return Setting(
        section=section,
        name=field.name,
        kind=field.metadata["unit"] or kind,
        choices=choices,
        default=None if field.default is dataclasses.MISSING else field.default,
        is_optional=type(None) in members,
        is_secret=field.metadata["secret"],
        help=field.metadata["help"],
        least=field.metadata["ge"],
        most=field.metadata["le"],
    )


def _registered_choices(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the default and the names that the function of `choices_from` returns; nothing without one."""
    source: str | None = field.metadata["choices_from"]
    if source is None:
        return ()
    module, _, function = source.partition(":")
    names: Iterable[str] = getattr(importlib.import_module(module), function)()
    return tuple(dict.fromkeys([str(field.default), *names]))


def _text(raw: object) -> str:
    if isinstance(raw, str) and raw:
        return raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)
    raise ValueError


def _path(raw: object) -> str:
    return os.path.expanduser(_text(os.fspath(raw) if isinstance(raw, os.PathLike) else raw))


def _number(raw: object) -> float:
    if isinstance(raw, int | float | str) and not isinstance(raw, bool) and math.isfinite(float(raw)):
        return float(raw)
    raise ValueError


def _json(raw: object) -> str:
    """Return a JSON object as compact text. Raises ValueError for anything else, and for a key that is given twice."""
    found = json.loads(raw, object_pairs_hook=_once) if isinstance(raw, str) else raw
    if not isinstance(found, dict):
        raise ValueError
    try:
        return json.dumps(found)
    except (TypeError, RecursionError):  # values of Python, or of YAML, that JSON has not
        raise ValueError from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _bytes(raw: object) -> int:
    if isinstance(raw, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", raw.strip())):
        number, unit = match.groups()
        if unit not in BYTE_UNITS:
            raise ValueError
        return int(float(number) * BYTE_UNITS[unit]) if "." in number else int(number) * BYTE_UNITS[unit]
    return integer(raw)


_PARSERS: Mapping[Kind, Callable[[object], Value]] = types.MappingProxyType(
    {
        "text": _text,
        "choice": _text,
        "integer": integer,
        "number": _number,
        "switch": switch,
        "bytes": _bytes,
        "json": _json,
        "path": _path,
    }
)


def _rejected(setting: Setting, raw: object, source: str) -> ConfigError:
    shown = "***" if setting.is_secret else repr(raw)[:120]
    hint = ""
    if setting.name == "port" and isinstance(raw, str) and raw.startswith("tcp://"):
        hint = " (Kubernetes sets it for a Service named `jaxserve`: use `enableServiceLinks: false`)"
    return ConfigError(f"{source} {shown}: expected {setting.limits or 'a text that is not empty'}{hint}")


SETTINGS = declared_settings()
"""All settings in the order of declaration. Names are unique over all sections, so a flat key needs no section."""
BY_NAME: Mapping[str, Setting] = types.MappingProxyType({setting.name: setting for setting in SETTINGS})
SECTIONS = tuple(dict.fromkeys(setting.section for setting in SETTINGS))
ENGINE_SECTIONS = ("model", "cache", "scheduler", "parallel", "compile", "images")
"""Sections that an engine needs; the others are about HTTP."""
SIZE_SECTIONS = (*ENGINE_SECTIONS, "tiers")
"""Sections that decide sizes and programs: an engine whose pages are copied has other groups of pages, and programs that copy."""


def value_of(config: Config, setting: Setting) -> Value:
    """Return the value of `setting` in `config`."""
    value: Value = getattr(getattr(config, setting.section), setting.name)
    return value


def describe(config: Config) -> str:
    """Return the settings in force, one line per section, with secrets masked."""
    width = max(map(len, SECTIONS))
    shown = {s: f"{s.name}={format_value(s, value_of(config, s))}" for s in SETTINGS}
    return "\n".join(
        f"{section:<{width}} " + " ".join(text for s, text in shown.items() if s.section == section)
        for section in SECTIONS
    )


def describe_changes(config: Config) -> str:
    """Return the settings that differ from their defaults, in one line, with secrets masked."""
    changed = [s for s in SETTINGS if value_of(config, s) != s.default]
    return " ".join(f"{s.name}={format_value(s, value_of(config, s))}" for s in changed)


def closest(word: str, known: Iterable[str]) -> str:
    """Return `; ` and what to use instead of a setting of other servers, or the nearest known word; else an empty text."""
    if (advice := advice_for_name(word)) is not None:
        return f"; {advice}"
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean `{matches[0]}`?" if matches else ""
