"""Bounds of request fields: declared in a field's annotation, shown by the API's documents. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.config import LimitsConfig


@dataclass(frozen=True, slots=True)
class Bound:
    """The least and most of a number, of the items of a collection, or of the characters of a text or of each of several."""

    of: Literal["value", "items", "characters"]
    least: int
    most: int | str | None = None
    """A number, or the name of the `LimitsConfig` field that holds it; None: no upper bound."""

    def upper(self, limits: LimitsConfig) -> int | None:
        return getattr(limits, self.most) if isinstance(self.most, str) else self.most

    @property
    def flag(self) -> str | None:
        """The flag that raises the limit."""
        return f"--{self.most.replace('_', '-')}" if isinstance(self.most, str) else None

    def words(self, limits: LimitsConfig) -> str:
        """Return the range in words, as in `1 to 128 items (--max-tools)`."""
        most = self.upper(limits)
        noun = "" if self.of == "value" else f" {self.of}"
        span = f"at least {self.least}" if most is None else f"{self.least} to {most}"
        return f"{span}{noun}" + (f" ({self.flag})" if self.flag else "")

    def keywords(self, limits: LimitsConfig) -> dict[str, Any]:
        """Return the range as keywords of JSON Schema."""
        most = self.upper(limits)
        low, high = {"value": ("minimum", "maximum"), "items": ("minItems", "maxItems")}.get(
            self.of, ("minLength", "maxLength")
        )
        words = {low: self.least} if most is None else {low: self.least, high: most}
        # A keyword counts for its own type only: one for texts also holds for those in a list.
        return words | ({"items": words} if self.of == "characters" else {})

    def sizes(self, value: Any) -> list[int]:
        """Return the numbers that the bound holds for."""
        if self.of == "value":
            return [value]
        if self.of == "items":
            return [1 if isinstance(value, str) else len(value)]
        return [len(text) for text in ([value] if isinstance(value, str) else value)]
