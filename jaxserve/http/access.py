"""Access to the server: API keys, and the origins whose web pages may call.

With an API key configured, every route is guarded unless it is declared public. The matched route decides, never a URL
string, and before the body is read. Web pages may call only from the origins of `--cors-allowed-origins`; no reply allows
credentials, since a page sends its key in a header.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from jaxserve.errors import AuthenticationError, OriginError
from jaxserve.tenants import Tenant

_SCHEME = b"bearer "


class KeyRing:
    """The accepted keys, kept as hashes, with their tenants. Without any key everybody may pass."""

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.has_several_names = False
        """True: keys have at least two names."""
        self.is_open = True
        """True: there is no key."""
        self._tenants: tuple[tuple[bytes, Tenant], ...] = ()
        self.replace(tenants)

    def shared_name(self, tenant: Tenant) -> str:
        """Return the name of a tenant that has to leave a part of the server to other keys; an empty text for the others."""
        return tenant.record.name if self.has_several_names else ""

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """Accept these keys from now on, and no others. Requests under way are not touched."""
        found = [*tenants]
        self._tenants = tuple((_digest(tenant.record.key.encode()), tenant) for tenant in found)
        self.is_open = not found
        self.has_several_names = len({tenant.record.name for tenant in found} - {""}) > 1

    def check(self, authorization: str | None, api_key: str | None = None) -> Tenant | None:
        """Return the tenant of the key in the `Authorization` or the `X-Api-Key` header; None if there is no key to ask for.

        Raises AuthenticationError unless one of the keys is given. The former header counts where both are given. Takes the
        same time whichever key is compared and wherever it differs.
        """
        if self.is_open:
            return None
        offered = _offered(authorization, api_key)
        if offered is None:
            raise AuthenticationError(
                "You didn't provide an API key. Provide it in an Authorization header using Bearer auth "
                "(i.e. Authorization: Bearer YOUR_KEY)."
            )
        digest = _digest(offered)
        matches = [tenant for known, tenant in self._tenants if hmac.compare_digest(digest, known)]
        if not matches:
            raise AuthenticationError("Incorrect API key provided.")
        return matches[0]


def is_local_page(origin: str) -> bool:
    """Return True if the origin of a web page is this host."""
    try:
        name = (urlsplit(origin).hostname or "").rstrip(".")
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:  # neither: a name that anyone may let resolve to this host
        return False


def _offered(authorization: str | None, api_key: str | None) -> bytes | None:
    if authorization is None:
        return None if api_key is None else api_key.strip().encode("utf-8", "surrogateescape")
    header = authorization.encode("utf-8", "surrogateescape")
    return header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-_, ]{0,4096}")
_METHODS = "GET, POST, DELETE"
_MAX_AGE_S = 600
_MAX_ORIGIN_CHARS = 200
_EXPOSED = "X-Request-Id, request-id, x-jaxserve-ignored, x-jaxserve-tool-format, Retry-After"


class CorsPolicy:
    """The allowed origins."""

    def __init__(self, origins: str | None = None) -> None:
        """origins: comma separated, or `*`."""
        self._origins = frozenset(filter(None, (origin.strip() for origin in (origins or "").split(","))))

    def headers(self, request_headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a reply; none if the request's page may not call."""
        origin = request_headers.get("Origin")
        if origin is None or not self._origins & {"*", origin}:
            return {}
        common = {"Access-Control-Expose-Headers": _EXPOSED}
        if "*" in self._origins:
            return common | {"Access-Control-Allow-Origin": "*"}
        return common | {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    def preflight_headers(self, request_headers: Mapping[str, str]) -> dict[str, str] | None:
        """Return the headers of the reply to an OPTIONS request; None if it is no preflight request.

        Raises OriginError for pages that may not call.
        """
        origin = request_headers.get("Origin")
        if "Access-Control-Request-Method" not in request_headers or origin is None:
            return None
        allowed = self.headers(request_headers)
        if not allowed:
            shown = origin[:_MAX_ORIGIN_CHARS]
            raise OriginError(
                f"Web pages of the origin {shown!r} may not call this server: start it with --cors-allowed-origins {shown}."
            )
        asked = request_headers.get("Access-Control-Request-Headers", "")
        return allowed | {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": asked if _HEADER_NAMES.fullmatch(asked) else "",
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
