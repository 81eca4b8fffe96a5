"""Settings of TLS."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config.option import option
from jaxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """HTTPS without a proxy. The files are read again when they change, and on SIGHUP."""

    ssl_certfile: str | None = option(
        None,
        unit="path",
        help="file with the server's certificate and those that signed it (PEM): the port speaks HTTPS only",
    )
    ssl_keyfile: str | None = option(
        None,
        unit="path",
        help="file with the certificate's private key (PEM, no passphrase; default: in --ssl-certfile)",
    )
    ssl_ca_certs: str | None = option(
        None,
        unit="path",
        help="file with authorities (PEM): clients, probes among them, need a certificate that one of them signed",
    )

    def __post_init__(self) -> None:
        if self.ssl_certfile is None:
            for flag, value in (("--ssl-keyfile", self.ssl_keyfile), ("--ssl-ca-certs", self.ssl_ca_certs)):
                if value is not None:
                    raise ConfigError(f"{flag} {value}: needs --ssl-certfile")
