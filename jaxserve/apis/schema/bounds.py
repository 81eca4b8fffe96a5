"""How much a field of a request may hold: declared in its annotation, checked here, and told by the API's documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

import msgspec

from jaxserve.apis.schema.decode import shorten
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid


@dataclass(frozen=True, slots=True)
class Bound:
    """Least and most of a number, of the items of a collection, or of the characters of a text or of each of several."""

    of: Literal["value", "items", "characters"]
    least: int
    most: int | str | None = None
    """A number, or the name of the `LimitsConfig` field that says it; None: no limit of its own."""

    def upper(self, limits: LimitsConfig) -> int | None:
        return getattr(limits, self.most) if isinstance(self.most, str) else self.most

    @property
    def flag(self) -> str | None:
        """What raises the limit."""
        return f"--{self.most.replace('_', '-')}" if isinstance(self.most, str) else None

    def words(self, limits: LimitsConfig) -> str:
        """`1 to 128 items (--max-tools)`."""
        most = self.upper(limits)
        noun = "" if self.of == "value" else f" {self.of}"
        span = f"at least {self.least}" if most is None else f"{self.least} to {most}"
        return f"{span}{noun}" + (f" ({self.flag})" if self.flag else "")

    def keywords(self, limits: LimitsConfig) -> dict[str, Any]:
        """The same in JSON Schema."""
        most = self.upper(limits)
        low, high = {"value": ("minimum", "maximum"), "items": ("minItems", "maxItems")}.get(
            self.of, ("minLength", "maxLength")
        )
        words = {low: self.least} if most is None else {low: self.least, high: most}
        # A keyword counts for its own type alone: one for texts also holds for those in a list.
        return words | ({"items": words} if self.of == "characters" else {})

    def check(self, name: str, value: Any, limits: LimitsConfig) -> None:
        """Raise InvalidRequestError naming field, value, limit and flag."""
        most = self.upper(limits)
        for size in self._sizes(value):
            if size < self.least or (most is not None and size > most):
                raise invalid(name, f"must be {self.words(limits)}, got {shorten(size)}")

    def _sizes(self, value: Any) -> list[int]:
        if self.of == "value":
            return [value]
        if self.of == "items":
            return [1 if isinstance(value, str) else len(value)]
        return [len(text) for text in ([value] if isinstance(value, str) else value)]


@cache
def field_bounds(struct: type[msgspec.Struct]) -> Mapping[str, tuple[Bound, ...]]:
    """The bounds of each field that has some."""
    hints = get_type_hints(struct, include_extras=True)
    found = {name: [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bound)]
             for name, hint in hints.items()}  # fmt: skip
    return MappingProxyType({name: tuple(bounds) for name, bounds in found.items() if bounds})


def check_bounds(request: msgspec.Struct, limits: LimitsConfig) -> None:
    """Check every field that was given. Raises InvalidRequestError for the first that holds too much or too little."""
    for name, bounds in field_bounds(type(request)).items():
        value = getattr(request, name)
        if value is not None:
            for bound in bounds:
                bound.check(name, value, limits)
