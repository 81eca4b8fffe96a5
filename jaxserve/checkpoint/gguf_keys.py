"""The metadata of a GGUF file under the prefix of one architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from jaxserve.checkpoint.gguf_file import GGUFFile
from jaxserve.checkpoint.mapped_file import shown
from jaxserve.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class GGUFKeys:
    """Metadata under the prefix of one architecture, each value checked for its type and range."""

    file: GGUFFile
    architecture: str

    def integer(self, key: str, default: int | None = None, *, maximum: int = (1 << 31) - 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 0 < value <= maximum:
            self.fail(key, f"a whole number from 1 to {maximum}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """As a decimal: 1e-05, not 9.999999747378752e-06."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            self.fail(key, "a positive number", value)
        return float(decimal(float(value)))

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def fail(self, key: str, expected: str, found: Any) -> NoReturn:
        shown_found = "none" if found is None else shown(found) if isinstance(found, str) else str(found)[:80]
        raise CheckpointError(
            f"{self.file.path}: key '{self.architecture}.{key}': expected {expected}, found {shown_found}"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.get(key)
        return default if value is None else value


def decimal(value: Any) -> Any:
    """Of a number that was stored as float32 the shortest decimal that means it; all else as it is."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
