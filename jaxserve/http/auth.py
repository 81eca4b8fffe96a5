"""API keys: with one configured, every route is guarded unless it says it is public.

The decision is taken from the matched route, never from a URL string, and before the body is read.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from jaxserve.errors import AuthenticationError

_SCHEME = b"bearer "


class KeyRing:
    """The accepted keys, kept as hashes. Without any key everybody may pass."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    @property
    def is_open(self) -> bool:
        return not self._digests

    def check(self, authorization: str | None, api_key: str | None = None) -> None:
        """Raise AuthenticationError unless the `Authorization` or the `X-Api-Key` header carries one of the keys.

        The former counts where both are given. Takes the same time whichever key is compared and wherever it differs.
        """
        if self.is_open:
            return
        offered = _offered(authorization, api_key)
        if offered is None:
            raise AuthenticationError(
                "You didn't provide an API key. Provide it in an Authorization header using Bearer auth "
                "(i.e. Authorization: Bearer YOUR_KEY)."
            )
        matches = [hmac.compare_digest(_digest(offered), digest) for digest in self._digests]
        if not any(matches):
            raise AuthenticationError("Incorrect API key provided.")


def _offered(authorization: str | None, api_key: str | None) -> bytes | None:
    if authorization is None:
        return None if api_key is None else api_key.strip().encode("utf-8", "surrogateescape")
    header = authorization.encode("utf-8", "surrogateescape")
    return header[len(_SCHEME) :].strip() if header[: len(_SCHEME)].lower() == _SCHEME else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
