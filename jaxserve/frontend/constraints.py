"""The format that replies must have, under all the names by which clients ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec

from jaxserve.errors import invalid, unsupported

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]
NOTHING: Final[tuple[Any, ...]] = (None, False, "", [], {})
"""Values that ask for no format."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The format that every reply must match, and the path of the field that asks for it."""

    kind: Kind
    value: Any
    """A JSON schema as an object or text, a regular expression, a list of texts, or a grammar in Lark's or llama.cpp's
    format (GBNF)."""
    param: str

    @property
    def is_json(self) -> bool:
        """True if replies are JSON."""
        return self.kind in ("json", "json_object")

    def asks_for(self, other: Constraint) -> bool:
        """Return True if both ask for the same format."""
        return self.kind == other.kind and _decoded(self.value) == _decoded(other.value)


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of the first five. The switches change nothing here, and the last two are refused."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: dict[str, Any] | str | None = None


def structured_constraint(structured: StructuredOutputs | None) -> Constraint | None:
    """Return the constraint of vLLM's `structured_outputs`. Raises InvalidRequestError for more than one kind,
    and UnsupportedParameterError for what is not enforced.
    """
    if structured is None:
        return None
    for name in ("whitespace_pattern", "structural_tag"):
        if getattr(structured, name) is not None:
            raise unsupported(f"structured_outputs.{name}", "is not supported by this server")
    values = {name: getattr(structured, name) for name in get_args(Kind)}
    asked = {name: value for name, value in values.items() if value not in (None, False)}
    if len(asked) > 1:
        raise invalid("structured_outputs", f"one kind of constraint, got {', '.join(asked)}")
    for name, value in asked.items():
        return Constraint(name, value, f"structured_outputs.{name}")
    return None


def only_constraint(asked: Mapping[str, Constraint | None]) -> Constraint | None:
    """Return the constraint that all fields ask for, by the names of the fields; None if none does.

    Raises InvalidRequestError for fields that ask for different formats: no reply could be trusted to have both.
    """
    first_name, first = "", None
    for name, constraint in asked.items():
        if constraint is None:
            continue
        if first is None:
            first_name, first = name, constraint
        elif not constraint.asks_for(first):
            raise invalid(name, f"not together with {first_name}, unless both ask for the same")
    return first


def _decoded(value: Any) -> Any:
    """Return the object of a schema that is given as text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
