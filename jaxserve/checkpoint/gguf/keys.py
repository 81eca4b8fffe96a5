"""The metadata of a GGUF file under the prefix of one architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from jaxserve.checkpoint.gguf.file import GGUFFile
from jaxserve.errors import CheckpointError, shown

WINDOW: Final = "attention.sliding_window"
_PATTERN: Final = "attention.sliding_window_pattern"


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
        """Return a positive number as a decimal: 1e-05, not 9.999999747378752e-06."""
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
    """Return the shortest decimal of a number stored as float32, and any other value unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def no_window(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return no keys of its own for `config.json`; raise CheckpointError if the file has a sliding window."""
    if keys.get(WINDOW):
        keys.fail(WINDOW, "none for this architecture", keys.get(WINDOW))
    return {}


def layer_types(keys: GGUFKeys, config: Mapping[str, Any], period: int) -> list[str]:
    """Return `layer_types` as the file lists them; by default the last of every `period` layers has full attention."""
    count, stored = config["num_hidden_layers"], keys.get(_PATTERN)
    if isinstance(stored, list):
        if len(stored) != count or not all(isinstance(is_windowed, bool) for is_windowed in stored):
            keys.fail(_PATTERN, f"true or false for each of the {count} layers", stored)
        is_sliding = stored
    else:
        period = keys.integer(_PATTERN, period)
        is_sliding = [(layer + 1) % period != 0 for layer in range(count)]
    return ["sliding_attention" if is_windowed else "full_attention" for is_windowed in is_sliding]
