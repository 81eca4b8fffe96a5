"""API keys: with one configured, every route is guarded unless it says it is public.

The decision is taken from the matched route, never from a URL string, and before the body is read.
"""

from __future__ import annotations

import hashlib
import hmac

from jaxserve.errors import AuthenticationError

_SCHEME = b"bearer "


class KeyRing:
    """The accepted keys, kept as hashes. Without any key everybody may pass."""

    def __init__(self, api_keys: str | None) -> None:
        keys = (key.strip() for key in (api_keys or "").split(","))
        self._digests = tuple(_digest(key.encode()) for key in keys if key)

    @property
    def is_open(self) -> bool:
        return not self._digests

    def check(self, authorization: str | None) -> None:
        """Raise AuthenticationError unless the `Authorization` header carries one of the keys.

        Takes the same time whichever key is compared and wherever it differs.
        """
        if self.is_open:
            return
        header = (authorization or "").encode("utf-8", "surrogateescape")
        if header[: len(_SCHEME)].lower() != _SCHEME:
            raise AuthenticationError(
                "You didn't provide an API key. Provide it in an Authorization header using Bearer auth "
                "(i.e. Authorization: Bearer YOUR_KEY)."
            )
        offered = _digest(header[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(offered, digest) for digest in self._digests]
        if not any(matches):
            raise AuthenticationError("Incorrect API key provided.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
