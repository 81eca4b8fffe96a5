"""Checks of the size and the depth of JSON schemas in requests, before anything compiles them."""

from __future__ import annotations

from typing import Any, Final

from jaxserve.errors import InvalidRequestError, invalid
from jaxserve.frontend.checks import shorten

_COUNTS: Final = ("minItems", "minLength", "minProperties")
_MAX_COUNT: Final = 100_000
"""More than any context holds: a reply that needs as many would be cut off."""
_MAX_VALUES: Final = 1 << 17
"""Values of a schema: reading more would hold up the event loop."""


def check_schema(schema: dict[str, Any], param: str, max_depth: int) -> None:
    """Raise InvalidRequestError for a schema that is too large, nested too deeply, or has options of the compiler."""
    places: list[tuple[Any, int]] = [(schema, 1)]
    num_values = 0
    while places:
        value, depth = places.pop()
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
            places += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            places += [(child, depth + 1) for child in value]


def too_deep(param: str, max_depth: int) -> InvalidRequestError:
    """Return the error for a schema that is nested too deeply."""
    return invalid(param, f"nested deeper than {max_depth} (--max-grammar-depth)")
