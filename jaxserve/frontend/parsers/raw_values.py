"""Terms of values that are written without quotes if they are strings, and otherwise as JSON.

A text that the grammar admits has to become a value of the schema when `typed_json` reads it, so a string that reads like a
value of another type is left out if the schema allows that type with other values.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

from jaxserve.errors import invalid
from jaxserve.frontend.parsers.arguments import ANNOTATIONS, Arguments
from jaxserve.frontend.parsers.schema_types import ParameterTypes, type_of, typed_json
from jaxserve.ipc.call_grammar import ANY_TEXT, Either, Term, Terms
from jaxserve.structured.protocol import OVERLAPPING_ONE_OF

_INTEGER: Final = "-?(0|[1-9][0-9]*)"
_SCALARS: Final = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": f"/{_INTEGER}/",
    "number": rf"/{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
}
"""Terminals of the values of types."""
_LOOKALIKES: Final = {
    "null": r"\s*(null|None)\s*",
    "boolean": r"\s*(true|false|True|False)\s*",
    "integer": r"\s*-?[0-9](?s:.*)",
    "number": r"\s*-?[0-9](?s:.*)",
    "object": r"\s*\{(?s:.*)",
    "array": r"\s*\[(?s:.*)",
}
"""Patterns of texts that may read as values of types."""
_DATE: Final = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:([a-zA-Z0-9._~:\/?#\[\]@!$&'()*+,;=-]|%[0-9a-fA-F]{2})+",
}
"""Patterns of formats of JSON Schema: a part of the texts of each."""
_MAX_BRANCHES: Final = 256
_MAX_DEPTH: Final = 32
_LAST_ANCHOR: Final = re.compile(r"(\\*)\$\Z")
"""The sign for the end of a text, and the backslashes before it: of an odd number the last one makes it a dollar."""
_ESCAPE_OR_END: Final = re.compile(r"\\.|\\\Z|/|\n", re.DOTALL)
_WRITTEN: Final = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "\\": r"\\"}
_PYTHON_WORDS: Final[dict[str, list[Terms]]] = {"null": [("None",)], "boolean": [("True",), ("False",)]}


class Value(NamedTuple):
    """A value: a text, JSON, or either."""

    text: str | None
    """The terminal of its texts; None: it is no text."""
    json: Term | None
    """Its JSON; None: it is always a text."""


def raw_value(schema: dict[str, Any], types: frozenset[str], arguments: Arguments, *, has_flag: bool = False) -> Value:
    """Return the value of a parameter. Raises UnsupportedParameterError.

    types: those of the parameter, as `ParameterTypes` finds them for the parser. has_flag: something beside the value says
    whether it is a text.
    """
    if types and "string" not in types:
        return Value(None, arguments.json_term(schema))
    if types and types != {"string"}:
        return _Union(schema, types, arguments, has_flag=has_flag).value
    text = string_terminal(schema, arguments)
    if text is None:
        raise arguments.unsupported("a schema that no string satisfies")
    return Value(text, arguments.json_term(schema) if has_flag and not types else None)


def python_value(schema: dict[str, Any], arguments: Arguments) -> Term:
    """Return a value as JSON, which Python reads, but with Python's words for one that is true, false or null."""
    words, others = list[Terms](), list[dict[str, Any]]()
    for branch in branches_of(schema, arguments):
        word = _PYTHON_WORDS.get(branch.get("type", "")) if branch.keys() <= ANNOTATIONS | {"type"} else None
        if word is None:
            others.append(branch)
        else:
            words += word
    if not words:
        return arguments.json_term(schema)
    json_values: list[Terms] = [(arguments.json_term({"anyOf": others}),)] if others else []
    return Either((*words, *json_values))


def branches_of(schema: dict[str, Any], arguments: Arguments) -> list[dict[str, Any]]:
    """Return schemas of which one applies, each with at most one type where that is simple to say."""
    found: list[dict[str, Any]] = []
    places: list[Any] = [schema]
    while places:
        if len(found) + len(places) > _MAX_BRANCHES:
            raise arguments.unsupported("a schema of so many alternatives")
        part = arguments.resolved(places.pop())
        names = part.keys() - ANNOTATIONS
        if names == {"oneOf"} and len(part["oneOf"]) > 1:
            raise invalid(arguments.param, OVERLAPPING_ONE_OF)
        combining = next((name for name in ("anyOf", "oneOf", "allOf") if names == {name}), None)
        if combining is not None and (combining != "allOf" or len(part[combining]) == 1):
            places += reversed(part[combining])
        elif isinstance(named := part.get("type"), list) and not names & {"enum", "const"}:
            places += [{**part, "type": name} for name in reversed(named)]
        else:
            found.append(part)
    return found


def string_terminal(schema: Any, arguments: Arguments, depth: int = 0) -> str | None:
    """Return the terminal of the strings of a schema; None if it allows none."""
    if depth > _MAX_DEPTH:
        raise arguments.unsupported("a schema that is nested so deeply, or in itself")
    found = arguments.resolved(schema)
    named = found.get("type", "string")
    if named != "string" and not (isinstance(named, list) and "string" in named):
        return None
    parts = []
    for name, value in found.items():
        if name in ("anyOf", "oneOf", "allOf"):
            terminals = [string_terminal(each, arguments, depth + 1) for each in value]
            allowed = [terminal for terminal in terminals if terminal is not None]
            if not allowed or (name == "allOf" and None in terminals):
                return None
            if name == "oneOf" and len(allowed) > 1:
                raise invalid(arguments.param, OVERLAPPING_ONE_OF)
            parts.append((" & " if name == "allOf" else " | ").join(allowed))
        elif name in ("enum", "const"):
            texts = [each for each in (value if name == "enum" else [value]) if isinstance(each, str)]
            if not texts:
                return None
            parts.append(" | ".join(map(_literal, texts)))
        elif name in ("minLength", "maxLength"):
            bounds = f"{value}," if name == "minLength" else f"0,{value}"
            parts.append(f"/(?s:.{{{bounds}}})/")
        elif name == "pattern":
            parts.append(_search(value))
        elif name == "format":
            if value not in _FORMATS:
                raise arguments.unsupported(f"the format {value}")
            parts.append(f"/{_FORMATS[value]}/")
        elif name in ("not", "if", "$ref"):
            raise arguments.unsupported(f"{name} of a string")
    terminal = " & ".join(f"({part})" for part in parts) or ANY_TEXT
    arguments.spend(len(terminal))
    return terminal


def _search(pattern: str) -> str:
    """Return the terminal of texts in which a pattern of JSON Schema is found. Without look-around, anchors are at its ends only."""
    begin, end = "(?s:.*)", "(?s:.*)"
    if pattern.startswith("^"):
        begin, pattern = "", pattern[1:]
    if (last := _LAST_ANCHOR.search(pattern)) and len(last[1]) % 2 == 0:
        end, pattern = "", pattern[:-1]
    return f"/{begin}(?:{_slashed(pattern)}){end}/"


def _slashed(pattern: str) -> str:
    """Return a pattern without a bare slash or line break, which would end it in a grammar."""
    return _ESCAPE_OR_END.sub(lambda found: _WRITTEN.get(found[0], found[0]), pattern)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Union:
    """A value that may be a string, or of another type."""

    def __init__(self, schema: dict[str, Any], types: frozenset[str], arguments: Arguments, *, has_flag: bool) -> None:
        self._types = types
        self._arguments = arguments
        self._has_flag = has_flag
        self._strings: list[str] = []
        self._others: list[str] = []
        """Terminals of values that are read as what they are."""
        self._json: list[dict[str, Any]] = []
        self._plain: set[str] = set()
        """Types other than strings that the schema allows whole: a text that reads as one is right."""
        for branch in branches_of(schema, arguments):
            self._add(branch)
        different = set[str]() if has_flag else types - {"string"} - self._plain
        lookalikes = [f"~/{_LOOKALIKES[name]}/" for name in sorted(different)]
        texts = [" & ".join((f"({text})", *lookalikes)) for text in self._strings] + self._others
        json_schema = self._json[0] if len(self._json) == 1 else {"anyOf": self._json}
        self.value = Value(
            " | ".join(f"({text})" for text in texts) or None,
            arguments.json_term(json_schema) if self._json else None,
        )

    def _add(self, branch: dict[str, Any]) -> None:
        types = ParameterTypes(self._arguments.root).of_schema(branch)
        keywords = branch.keys() - ANNOTATIONS
        if "enum" in keywords or "const" in keywords:
            self._add_values(branch, keywords)
        elif types == {"string"}:
            text = string_terminal(branch, self._arguments)
            self._strings += [] if text is None else [text]
        elif not self._has_flag and keywords == {"type"} and branch["type"] in _SCALARS:
            self._plain |= types
            self._others.append(_SCALARS[branch["type"]])
        elif types and "string" not in types:
            self._json.append(branch)
        else:
            raise self._arguments.unsupported("a schema of strings and other types")

    def _add_values(self, branch: dict[str, Any], keywords: set[str]) -> None:
        """Add values that are listed, and that are read as they are written."""
        if keywords - {"enum", "const", "type"} or {"enum", "const"} <= keywords:
            raise self._arguments.unsupported("enum beside other keywords")
        named = ParameterTypes({}).of_schema({"type": branch.get("type")})
        values = branch["enum"] if "enum" in keywords else [branch["const"]]
        values = [value for value in values if not named or type_of(value) in named]
        if self._has_flag:
            self._others += [_literal(value) for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            self._json += [{"enum": others}] if others else []
            return
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            if json.loads(typed_json(text, self._types)) == value:
                self._others.append(_literal(text))
