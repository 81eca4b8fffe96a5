"""Paths that are nearly those of a route: with a slash at the end, with a part twice, without the version."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jaxserve.apis.routes import ApiStyle, Route

_SLASHES = re.compile(r"/{2,}")
_VERSIONS = re.compile(r"(/v\d+)+(?=/v\d+/)")
_MAX_CHARS = 256


def with_slash(route: Route) -> str | None:
    """Return the second path at which a route is served; None if it has none.

    Public routes have none, so that what needs no key is exactly what is listed.
    """
    return None if route.is_public or route.path.endswith("/") or ":" in route.path else f"{route.path}/"


def likely_path(path: str, routes: Iterable[Route]) -> str | None:
    """Return the path of a route that the client may have meant; None if there is no such."""
    if len(path) > _MAX_CHARS:
        return None
    known = {route.path for route in routes if "{" not in route.path}
    plain = _VERSIONS.sub("", _SLASHES.sub("/", path)).rstrip("/")
    if plain in known and plain != path:
        return plain
    ends = [one for one in known if one.count("/") > 1 and (one.endswith(plain) or plain.endswith(one))]
    return max(ends, key=len) if plain.count("/") and ends else None


def style_of_path(path: str, styles: Mapping[str, ApiStyle]) -> ApiStyle:
    """Return the style of the API to which an unknown path belongs, by the paths of routes with a style of their own."""
    plain = _SLASHES.sub("/", path)
    return next(
        (style for known, style in styles.items() if plain == known or plain.startswith(f"{known}/")), ApiStyle()
    )
