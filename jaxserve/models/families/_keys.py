"""Typed and bounded access to the keys of a model config, with one-line errors naming key, value and supported values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import CheckpointError

MAX_SHOWN = 80
"""Characters of a rejected value that an error shows: a config may hold anything."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A table of a config and the path to it (`prefix`, as in `rope_scaling.`)."""

    table: Mapping[str, Any]
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    """The config's name by ours, for keys that a family names differently."""

    def get(self, key: str) -> Any:
        """Return the value unchecked; None if absent or null."""
        return self.table.get(key)

    def integer(self, key: str, high: int, *, low: int = 1) -> int:
        """Return the integer at `key`, within [low, high]: a damaged config must not ask for absurd allocations."""
        expected = f"an integer from {low} to {high}"
        value = self._present(key, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, expected)
        return value

    def number(self, key: str, *, low: float = 0.0, high: float = math.inf) -> float:
        """Return the finite number at `key`, above zero and within [low, high]."""
        expected = "a finite number above 0" if high == math.inf else f"a number from {low:g} to {high:g}"
        value = self._present(key, expected)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0 or not low <= value <= high:
            raise self.error(key, expected)
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return the list at `key`: `count` finite numbers above zero."""
        expected = f"a list of {count} finite numbers above 0"
        values = self._present(key, expected)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(key, expected)
        return tuple(Keys({key: value}, self.prefix).number(key) for value in values)

    def flag(self, key: str) -> bool:
        """Return the boolean at `key`."""
        value = self._present(key, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def require(self, key: str, *accepted: object) -> None:
        """Raise CheckpointError unless the key is absent or has one of the accepted values."""
        if key in self.table and not any(_is_same(self.table[key], value) for value in accepted):
            raise self.error(key, " or ".join(_shown(value) for value in accepted))

    def error(self, key: str, supported: str) -> CheckpointError:
        """Return the error for the value at `key`."""
        return CheckpointError(
            f"model config: {self.prefix}{self.names.get(key, key)} is {_shown(self.table.get(key))}; supported: {supported}"
        )

    def _present(self, key: str, expected: str) -> Any:
        if key not in self.table:
            raise CheckpointError(
                f"model config: the key {self.prefix}{self.names.get(key, key)} is missing; expected {expected}"
            )
        return self.table[key]


def _is_same(found: object, accepted: object) -> bool:
    return found == accepted and isinstance(found, bool) == isinstance(accepted, bool)


def _shown(value: object) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
