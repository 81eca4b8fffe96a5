"""The server's side of TLS: a context from the files of the settings, and word of their changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from typing import Final

from jaxserve.config.tls import TlsConfig
from jaxserve.errors import ConfigError

CHECK_S: Final = 10.0
"""Time between two looks at the files: certificates are renewed days before they end."""

FileVersion = tuple[int, int, int]
"""Inode, time of change (ns) and size."""


def tls_context(config: TlsConfig) -> ssl.SSLContext | None:
    """Read certificate, key and authorities; None: the server speaks plain HTTP.

    Raises ConfigError that names the file.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without `password` OpenSSL would ask at the terminal for the passphrase of an encrypted key.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = f"--ssl-certfile {config.ssl_certfile}"
        files += "" if config.ssl_keyfile is None else f", --ssl-keyfile {config.ssl_keyfile}"
        raise ConfigError(f"{files}: {_reason(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


_REASONS: Final = {
    "KEY_VALUES_MISMATCH": "the key is not the certificate's",
    "BAD_DECRYPT": "the key has a passphrase: store it without one",
    "BAD_PASSWORD_READ": "the key has a passphrase: store it without one",
    "NO_CERTIFICATE_OR_CRL_FOUND": "no certificate in PEM form",
}
"""Meanings of OpenSSL's codes. It has several for files of another kind, and some errors have none."""


async def file_changes(config: TlsConfig, asked: asyncio.Event) -> AsyncIterator[None]:
    """Yield each time that a file of the settings has changed, or `asked` was set."""
    seen = _versions(config)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), CHECK_S)
        now = _versions(config)
        if now != seen or asked.is_set():
            seen = now
            asked.clear()
            yield


def _versions(config: TlsConfig) -> tuple[FileVersion | None, ...]:
    files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
    return tuple(file_version(file) for file in files if file is not None)


def file_version(file: str) -> FileVersion | None:
    """Return values that change when a file changes; None if it is missing."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _reason(error: Exception) -> str:
    """Return what is wrong, without the names of OpenSSL's sources."""
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", "no certificate or no key in PEM form")
    return getattr(error, "strerror", None) or str(error)
