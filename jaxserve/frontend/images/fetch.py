"""Fetches images from the hosts that the operator allows, as little trusting as possible.

The name is resolved once; every address must be public, and the connection goes to an address that was checked, so that a
second answer of the name server changes nothing. Redirects are not followed, no proxy and no cookie is used, the body is
not decompressed, and time and size are limited.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Final

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from jaxserve.config import ImagesConfig
from jaxserve.errors import InvalidRequestError, invalid
from jaxserve.frontend.images.source import ImageSource, read_url, too_large

_CHUNK_BYTES: Final = 1 << 16
_OK: Final = 200
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses whose last 32 bits are an IPv4 address (RFC 6052)."""
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""IPv6 addresses of hosts on the internet (RFC 4291). `is_global` is true of others too, such as site-local ones."""
_OWN: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocols (RFC 6890), and the metadata of Oracle's cloud
            "168.63.129.16",  # Azure's service for each of its virtual machines
            "3fff::/20",  # documentation (RFC 9637)
        ),
    )
)
"""Networks that are not public although `is_global` may be true of their addresses."""


class PrivateAddressError(OSError):
    """A name resolves to an address that is not public."""


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses only."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises PrivateAddressError if one of them is not public."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        results = []
        for own_family, _, protocol, _, address in found:
            ip = str(address[0])
            if not is_public(ip):
                raise PrivateAddressError(f"{host} resolves to an address that is not public")
            results.append(
                ResolveResult(
                    hostname=host, host=ip, port=port, family=own_family, proto=protocol, flags=socket.AI_NUMERICHOST
                )
            )
        return results

    async def close(self) -> None:
        """There is nothing to close."""


def is_public(address: str) -> bool:
    """Return True for an address that everyone can reach; an IPv4 address in an IPv6 one counts as itself."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo is not None else None)
        if inner is not None:
            return is_public(str(inner))
        if ip not in _GLOBAL_UNICAST:
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _OWN)


async def fetch(source: ImageSource, config: ImagesConfig) -> bytes:
    """Return the file at the URL of `source`. Raises InvalidRequestError."""
    url = read_url(source, config.domains)
    try:
        async with asyncio.timeout(config.image_fetch_timeout):
            return await _get(url, source.place, config.max_image_size)
    except InvalidRequestError:
        raise
    except TimeoutError:
        raise invalid(
            source.place, f"the file did not arrive within {config.image_fetch_timeout:g} s (--image-fetch-timeout)"
        ) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        cause = _cause(error)
        if isinstance(cause, PrivateAddressError):
            raise invalid(source.place, str(cause)) from None
        raise invalid(source.place, f"the file could not be fetched ({type(cause).__name__})") from None


async def _get(url: URL, place: str, max_bytes: int) -> bytes:
    connector = aiohttp.TCPConnector(resolver=PublicResolver(), use_dns_cache=False, force_close=True, limit=1)
    async with (
        aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
        ) as session,
        session.get(
            url, allow_redirects=False, headers={"Accept-Encoding": "identity", "Accept": "image/*, video/*"}
        ) as reply,
    ):
        if reply.status != _OK:
            what = "a redirect, which is not followed" if 300 <= reply.status < 400 else f"status {reply.status}"
            raise invalid(place, f"the host answered with {what}")
        if reply.content_length is not None and reply.content_length > max_bytes:
            raise too_large(place, max_bytes)
        data = bytearray()
        async for chunk in reply.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > max_bytes:
                raise too_large(place, max_bytes)
        return bytes(data)


def _cause(error: BaseException) -> BaseException:
    """Return the error of the system below one of aiohttp, which may name addresses."""
    return error.__cause__ if isinstance(error.__cause__, OSError) else error
