"""The format that a request asks its replies to have, as its caller gave it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxserve.errors import invalid

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What every reply must match, and the path of the field that asks for it."""

    kind: Kind
    value: Any
    """A JSON schema as an object or text, a regular expression, a list of texts, or a grammar in Lark's format."""
    param: str


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def chosen_constraint(
    structured: StructuredOutputs | None, formatted: Constraint | None = None, format_name: str = "response_format"
) -> Constraint | None:
    """Return the constraint of vLLM's `structured_outputs`, or `formatted`, that of the field `format_name`.

    Raises InvalidRequestError for both, and for anything but one kind of constraint.
    """
    if structured is None:
        return formatted
    if formatted is not None:
        raise invalid("structured_outputs", f"not together with {format_name}")
    asked = {name: value for name, value in msgspec.structs.asdict(structured).items() if value not in (None, False)}
    if not asked:
        return None
    if len(asked) > 1:
        raise invalid("structured_outputs", f"one kind of constraint, got {', '.join(asked)}")
    ((name, value),) = asked.items()
    return Constraint(name, value, f"structured_outputs.{name}")  # type: ignore[arg-type]
