"""Checks of the size, the depth and the width of JSON schemas in requests, before anything compiles them."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final

from jaxserve.errors import InvalidRequestError, invalid
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.json_schema import referenced_schema

_COUNTS: Final = ("minItems", "minLength", "minProperties")
_MAX_COUNT: Final = 100_000
"""More than any context holds: a reply that needs as many would be cut off."""
_MAX_VALUES: Final = 1 << 17
"""Values of a schema: reading more would hold up the event loop."""
_MAX_WIDTH: Final = 1000
"""Optional properties that may come next: of one object, or of all alternatives together. A grammar's parser follows each
of them, so the time of a mask grows with their number (`jaxserve.structured.compiling`)."""
_COMBINING: Final = ("allOf", "anyOf", "oneOf")
_WIDE: Final = frozenset(("properties", "patternProperties", *_COMBINING))
"""Keywords without which no schema is wide by itself; the target of a reference is checked where it is."""
_OF_CONTAINERS: Final = frozenset(("properties", "patternProperties", "additionalProperties", "items", "prefixItems"))
_MAX_REFERENCES: Final = 64

Path = tuple["Path", str] | None
"""The keys that lead to a part of a schema, the last one outermost."""


def check_schema(schema: dict[str, Any], param: str, max_depth: int) -> None:
    """Raise InvalidRequestError for a schema that is too large, too wide, nested too deeply, or has options of the compiler."""
    places: list[tuple[Any, int, Path]] = [(schema, 1, None)]
    widths = _Widths(schema)
    num_values = 0
    while places:
        value, depth, path = places.pop()
        num_values += 1
        if num_values > _MAX_VALUES:
            raise invalid(param, f"it has more than {_MAX_VALUES} values")
        if depth > max_depth:
            raise too_deep(param, max_depth)
        if isinstance(value, dict):
            if "x-guidance" in value:  # the schema of a part may be compiled alone
                raise invalid(param, "x-guidance: options of the compiler are not for requests")
            for name in _COUNTS:
                if isinstance(count := value.get(name), int) and count > _MAX_COUNT:
                    raise invalid(param, f"{name}: at most {_MAX_COUNT}, got {shorten(count)}")
            if not _WIDE.isdisjoint(value) and (width := widths.of(value)) > _MAX_WIDTH:
                raise _too_wide(param, path, width)
            places += [(child, depth + 1, (path, name)) for name, child in value.items()]
        elif isinstance(value, list):
            places += [(child, depth + 1, (path, str(i))) for i, child in enumerate(value)]


class _Widths:
    """The optional properties and alternatives that may come next where each part of a schema begins."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._known: dict[int, int] = {}
        """Widths by the identity of a schema; 0 while one is being found, so that a reference to itself adds nothing."""

    def of(self, schema: Any, depth: int = 0) -> int:
        """Return the width of one part, without what is inside its alternatives."""
        if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
            return 0
        if id(schema) not in self._known:
            self._known[id(schema)] = 0
            alternatives = [part for name in _COMBINING for part in _listed(schema.get(name))]
            parts = [self._at_its_begin(part, depth + 1) for part in alternatives]
            parts.append(self.of(referenced_schema(schema.get("$ref"), self._root), depth + 1))
            self._known[id(schema)] = _own_width(schema) + sum(parts)
        return self._known[id(schema)]

    def _at_its_begin(self, schema: Any, depth: int) -> int:
        """Return the width of an alternative beside others: once it has written a required property, the others are left."""
        if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
            return 0
        if "$ref" in schema:
            return self._at_its_begin(referenced_schema(schema["$ref"], self._root), depth + 1)
        if any(name in schema for name in _COMBINING):
            return self.of(schema, depth)
        return _own_width(schema, begin_only=True)


def _own_width(schema: dict[str, Any], *, begin_only: bool = False) -> int:
    """Return the longest run of optional properties, and 2 for the rest of an object or a list; 0 for another value.

    begin_only: count the run at the beginning, also if a later one is longer.
    The compiler writes an object with `minProperties` out once for each property that may be the one it has.
    """
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    required = {name for name in _listed(schema.get("required")) if isinstance(name, str)}
    names = properties if isinstance(properties, dict) else ()
    runs = [0 if is_required else len(list(run)) for is_required, run in groupby(name in required for name in names)]
    run = max(runs[:1] if begin_only else runs, default=0)
    num_optional = run * run // 3 if schema.get("minProperties") and "maxProperties" not in schema else run
    num_patterns = len(patterns) if isinstance(patterns, dict) else 0
    return num_optional + num_patterns + 2 * bool(_OF_CONTAINERS & schema.keys())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _too_wide(param: str, path: Path, width: int) -> InvalidRequestError:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.insert(0, step)
    place = shorten("/".join(("#", *steps)))
    return invalid(
        param,
        f"{place}: at most {_MAX_WIDTH} optional properties and alternatives may come next at one place, got {width}",
    )


def too_deep(param: str, max_depth: int) -> InvalidRequestError:
    """Return the error for a schema that is nested too deeply."""
    return invalid(param, f"nested deeper than {max_depth} (--max-grammar-depth)")
