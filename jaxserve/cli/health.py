"""`jaxserve health`: check that a running server serves, or lives. Standard library only, for container health checks."""

from __future__ import annotations

import argparse
import http.client
import ssl
import sys
import threading
import urllib.error
import urllib.request

from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import base_url, own_certificate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="base URL of the server (default: from JAXSERVE_HOST and JAXSERVE_PORT)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--live",
        action="store_true",
        help="ask /live (runs, or loads, or mends itself) instead of /health (serves requests)",
    )
    group.add_argument("--ready", action="store_true", help="ask /ready, which balancers ask, instead of /health")
    parser.add_argument("--timeout", type=seconds, default=3.0, metavar="SECONDS", help="time-out (default: 3)")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if the server answers 200, else 1 with the reason on stderr."""
    path = "/live" if arguments.live else "/ready" if arguments.ready else "/health"
    url = base_url(arguments.url) + path
    problem = check_health(url, timeout_s=arguments.timeout, opener=opener_of(arguments.url))
    if problem is None:
        print(f"{url}: ok")
        return 0
    print(f"{url}: {problem}", file=sys.stderr)
    return 1


def seconds(text: str) -> float:
    """Return the time-out that a flag gives. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def opener_of(given: str | None) -> urllib.request.OpenerDirector:
    """Return what opens URLs of the server that `--url` names, None: of this environment's server.

    The latter is known by its own certificate (JAXSERVE_SSL_CERTFILE), which need not name 127.0.0.1. Others are checked
    with the system's authorities, or those of SSL_CERT_FILE. Raises ConfigError for a certificate that cannot be read.
    """
    direct = urllib.request.ProxyHandler({})  # http_proxy must not catch localhost
    certificate = None if given is not None else own_certificate()
    if certificate is None:
        return urllib.request.build_opener(direct)
    try:
        context = ssl.create_default_context(cafile=certificate)
    except OSError as error:  # ssl.SSLError as well
        raise ConfigError(f"JAXSERVE_SSL_CERTFILE {certificate}: cannot be read: {error.strerror or error}") from error
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may have no authority
    return urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=context))


def check_health(url: str, *, timeout_s: float, opener: urllib.request.OpenerDirector | None = None) -> str | None:
    """Return None if `url` answers 200, else the reason in a few words."""
    try:
        with (opener or opener_of(url)).open(url, timeout=timeout_s) as response:
            return None if response.status == 200 else f"answered {response.status}"
    except urllib.error.HTTPError as error:
        error.close()
        return f"answered {error.code}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return no_answer(error)


def no_answer(error: Exception) -> str:
    """Return why a server gave no answer, in a few words."""
    reason = getattr(error, "reason", error)
    reason = getattr(reason, "strerror", None) or reason
    if not isinstance(error, OSError | ValueError):
        reason = repr(error)  # it may quote the server
    return f"no answer: {reason}"
