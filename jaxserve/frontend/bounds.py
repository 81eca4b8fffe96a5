"""Checks of the bounds that request fields declare."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_type_hints

import msgspec

from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid
from jaxserve.frontend.checks import shorten


@cache
def field_bounds(struct: type[msgspec.Struct]) -> Mapping[str, tuple[Bound, ...]]:
    """Return the bounds of each field that has some."""
    hints = get_type_hints(struct, include_extras=True)
    found = {name: [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bound)]
             for name, hint in hints.items()}  # fmt: skip
    return MappingProxyType({name: tuple(bounds) for name, bounds in found.items() if bounds})


def check_bounds(request: msgspec.Struct, limits: LimitsConfig) -> None:
    """Check every field that was given. Raises InvalidRequestError for the first one out of its bounds."""
    for name, bounds in field_bounds(type(request)).items():
        value = getattr(request, name)
        if value is not None:
            for bound in bounds:
                check_bound(bound, name, value, limits)


def check_bound(bound: Bound, name: str, value: Any, limits: LimitsConfig) -> None:
    """Raise InvalidRequestError naming field, value, limit and flag if `value` is out of its bound."""
    most = bound.upper(limits)
    for size in bound.sizes(value):
        if size < bound.least or (most is not None and size > most):
            raise invalid(name, f"must be {bound.words(limits)}, got {shorten(size)}")
