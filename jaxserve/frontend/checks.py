"""Checks that several fields share. Each raises InvalidRequestError naming field, value and limit."""

from __future__ import annotations

from typing import Any

from jaxserve.apis.schema.decode import shorten
from jaxserve.errors import invalid


def check_count(name: str, count: int, limit: int, unit: str) -> None:
    """Refuse more than `limit` of something."""
    if count > limit:
        raise invalid(name, f"at most {limit} {unit}, got {count}")


def check_token_ids(name: str, token_ids: list[Any], vocab_size: int) -> None:
    """Refuse anything but integers in [0, vocab_size)."""
    if not token_ids:
        return
    if set(map(type, token_ids)) != {int}:
        raise invalid(name, "token ids must be integers")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise invalid(
            name, f"token id {shorten(low if low < 0 else high)} is outside the vocabulary (0 to {vocab_size - 1})"
        )
