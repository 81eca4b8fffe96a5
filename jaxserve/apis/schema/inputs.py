"""Fields that hold a text, token ids, or several of either."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import invalid
from jaxserve.frontend.checks import missing


def texts_or_ids(name: str, value: str | list[Any] | None) -> list[str | list[int]]:
    """Return each text or list of ids as one entry; none is empty. Ids are checked later, against the vocabulary."""
    if value is None:
        raise missing(name)
    if isinstance(value, str) or (value and type(value[0]) is int):
        value = [value]
    if not value or any(len(one) == 0 for one in value if isinstance(one, str | list)):
        raise invalid(name, "must not be empty")
    if not (all(isinstance(one, str) for one in value) or all(isinstance(one, list) for one in value)):
        raise invalid(name, "must be a string, a list of strings, a list of token ids, or a list of such lists")
    return value
