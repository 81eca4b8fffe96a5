"""Values of a checkpoint's files about preprocessing, and what their readers make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.preprocessing.images import ImageMarkup, Sizes

MAX_SIDE: Final = 1 << 14


class Table:
    """Values of one file, checked where they are used."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def integer(self, key: str, default: int | None, high: int) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self.error(key, f"an integer from 1 to {high}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def number(self, key: str, default: float) -> float:
        (value,) = self.numbers(key, [default], 1)
        return value

    def numbers(self, key: str, default: list[float], count: int) -> tuple[float, ...]:
        values = self.get(key, default)
        values = values if isinstance(values, list) else [values]
        if len(values) != count or not all(type(value) in (int, float) and abs(value) < 1e6 for value in values):
            raise self.error(key, f"{count} numbers")
        return tuple(map(float, values))

    def table(self, key: str, default: dict[str, int]) -> Table:
        value = self.get(key, default)
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Table(self.path, value)

    def square(self, key: str, default: int) -> int:
        """Return the side of a square that has a height and a width."""
        size = self.table(key, {"height": default, "width": default})
        height, width = (size.integer(side, None, MAX_SIDE) for side in ("height", "width"))
        if height != width:
            raise self.error(key, "a square")
        return height

    def error(self, key: str, expected: str) -> CheckpointError:
        found = shown(str(self.values.get(key))) if key in self.values else "nothing"
        return CheckpointError(f"{self.path}: {key}: expected {expected}, found {found}")


class Geometry(NamedTuple):
    """Sizes of images, patches and blocks, and the texts that stand for an image."""

    sizes: Sizes
    patch_size: int
    merge: int
    markup: ImageMarkup
    window: int | None = None
    inner_merge: int = 1
    has_class_token: bool = False
    mark_token_ids: tuple[int, ...] = ()


def token_text(tokens: Mapping[str, Any], key: str, default: str) -> str:
    """Return the text of a control token, which may be an object with the text in `content`."""
    extra = tokens.get("extra_special_tokens")
    found = tokens.get(key, extra.get(key) if isinstance(extra, dict) else None)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) and found else default
