"""Web pages that may call this server: none, unless `--cors-allowed-origins` names their origin.

Cookies play no part, so nothing is ever allowed "with credentials"; a page sends its key in a header.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxserve.errors import ConfigError

_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-\[\]:_]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-_, ]{0,4096}")
_METHODS = "GET, POST, DELETE"
_MAX_AGE_S = 600
_EXPOSED = "X-Request-Id, request-id, x-jaxserve-ignored, Retry-After"


class CorsPolicy:
    """The allowed origins. Raises ConfigError for a text that is none."""

    def __init__(self, origins: str | None = None) -> None:
        """origins: comma separated, or `*`."""
        self._origins = frozenset(filter(None, (origin.strip() for origin in (origins or "").split(","))))
        for origin in self._origins - {"*"}:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors-allowed-origins {origin!r}: expected `*` or origins such as https://chat.example.org"
                )

    def headers(self, request_headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a reply; none if the request's page may not call."""
        origin = request_headers.get("Origin")
        if origin is None or not self._origins & {"*", origin}:
            return {}
        common = {"Access-Control-Expose-Headers": _EXPOSED}
        if "*" in self._origins:
            return common | {"Access-Control-Allow-Origin": "*"}
        return common | {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    def preflight_headers(self, method: str, request_headers: Mapping[str, str]) -> dict[str, str] | None:
        """Return the headers of the reply to a preflight request; None for other requests and for pages that may not call."""
        if method != "OPTIONS" or "Access-Control-Request-Method" not in request_headers:
            return None
        allowed = self.headers(request_headers)
        if not allowed:
            return None
        asked = request_headers.get("Access-Control-Request-Headers", "")
        return allowed | {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": asked if _HEADER_NAMES.fullmatch(asked) else "",
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
