"""The messages between engines that exchange pages, the keys of their connections, and the addresses that may be used.

    request   header
    reply     header, then one frame for each page: its blocks, one after the other

Headers are MessagePack. A connection is encrypted and authenticated (CurveZMQ). The server's key pair is made from the shared
token (`--kv-peer-token`), and its public key is never sent: only a client with the token can open a connection, and only a
server with the token can answer. Until then neither takes a frame of the other. A peer can only be asked for pages, never be
given any.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final

import msgspec
import zmq
from zmq.utils import z85

from jaxserve.config.hosts import host_and_port
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.types import BlockHash

MAX_HASHES: Final = 4096
"""Pages that one request may name."""
MAX_REQUEST_BYTES: Final = 1 << 18
"""At least MAX_HASHES names of snapshots."""
MAX_REPLY_BYTES: Final = 32 << 20
"""Bytes of the pages of one reply, unless a single page is larger."""
CURVE_BYTES: Final = 33
"""By so much encryption makes a frame longer; zmq.MAXMSGSIZE counts them, too."""
_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")
"""Addresses within a provider's network (RFC 6598), which pods of clusters in clouds have."""


class WireError(JaxserveError):
    """A message that is no valid request or reply."""


class UnresolvedError(ConfigError):
    """A host that has no address now."""


class PageRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks how many pages of a prefix the peer has, or for those pages. Snapshots have names in place of hashes."""

    nonce: bytes
    """Repeated by the reply."""
    identity: str
    """PageLayout.identity of the sender."""
    hashes: list[BlockHash]
    max_pages: int
    """Pages wanted at most; 0: only their number."""
    wait_s: float = 0.0
    """Seconds that the answer may wait for pages that are on their way from the device."""
    finds_first: bool = False
    """True: which of the names is the first that the peer has, instead of how many leading ones."""


class PageReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The leading pages that the peer has."""

    nonce: bytes
    count: Annotated[int, msgspec.Meta(ge=0)]
    """Leading pages of the request that the peer has; with `finds_first` the index of the first that it has, or the number of names."""


class PageRefusal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The pages of the engine have another layout."""

    nonce: bytes


_REQUEST: Final = msgspec.msgpack.Decoder(PageRequest)
_REPLY: Final[msgspec.msgpack.Decoder[PageReply | PageRefusal]] = msgspec.msgpack.Decoder(PageReply | PageRefusal)


def secure_server(server: zmq.Socket[Any], token: str) -> None:
    """Let a socket that binds take connections of clients with the token only."""
    server.curve_secretkey = _server_key(token)
    server.curve_server = True


def secure_client(client: zmq.Socket[Any], token: str) -> None:
    """Let a socket that connects talk to servers with the token only."""
    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.curve_serverkey = zmq.curve_public(_server_key(token))


def _server_key(token: str) -> bytes:
    """Return the secret key of servers with this token."""
    return z85.encode(hmac.digest(token.encode("utf-8", "surrogatepass"), b"jaxserve KV pages", "sha256"))


def header_of(message: PageRequest | PageReply | PageRefusal) -> bytes:
    return msgspec.msgpack.encode(message)


def open_request(frames: list[bytes]) -> PageRequest:
    """Return the request in `frames`. Raises WireError."""
    if len(frames) != 1:
        raise WireError(f"a request of {len(frames)} frames")
    try:
        request = _REQUEST.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no request: {error}") from error
    if len(request.hashes) > MAX_HASHES:
        raise WireError(f"a request for {len(request.hashes)} pages, {MAX_HASHES} are allowed")
    return request


def open_reply(header: bytes) -> PageReply | PageRefusal:
    """Return the reply with this header. Raises WireError."""
    try:
        return _REPLY.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"no reply: {error}") from error


def is_address(entry: str, flag: str) -> bool:
    """Return True if the host of `HOST:PORT` is an address, False for a name. Raises ConfigError."""
    host, _ = host_and_port(flag, entry)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def endpoint_of(address: str, flag: str, token: str | None) -> str:
    """Return ZeroMQ's endpoint of `HOST:PORT`, the first one of a name. Raises the errors of `endpoints_of`."""
    return endpoints_of(address, flag, token)[0]


def endpoints_of(
    address: str, flag: str, token: str | None, resolve: Callable[[str], Iterable[str]] | None = None
) -> list[str]:
    """Return ZeroMQ's endpoints of `HOST:PORT`, sorted: one for each address of the host.

    Of a host with addresses of both families those of IPv4 are taken: each engine that `localhost` or a dual-stack Service names has one
    of either.
    resolve: returns the addresses of a host, or raises OSError; the resolver of the system unless it is given. Raises ConfigError if
    `address` is none, if an address of the host is not a loopback or private one, or if one needs a token: without one only
    programs of this host can be kept out, by the loopback address. Raises UnresolvedError if the host has no address now.
    """
    host, port = host_and_port(flag, address)
    try:
        found = sorted({entry.partition("%")[0] for entry in (resolve or _addresses_of)(host)})
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnresolvedError(f"{flag} {address!r}: the host cannot be resolved: {reason}") from error
    endpoints, addresses = list[str](), [ipaddress.ip_address(each) for each in found]
    family = min((each.version for each in addresses), default=4)
    for one in addresses:
        is_local = one.is_loopback or one.is_private or one.is_link_local or one in _SHARED
        if one.is_unspecified or not is_local:
            raise ConfigError(
                f"{flag} {address!r}: {one} is no loopback or private address: pages belong on a private network"
            )
        if not one.is_loopback and not token:
            raise ConfigError(f"{flag} {address!r}: an address beyond this host needs --kv-peer-token")
        if one.version == family:
            endpoints.append(f"tcp://[{one}]:{port}" if one.version == 6 else f"tcp://{one}:{port}")
    return endpoints


def _addresses_of(host: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def begin_probe(endpoint: str) -> socket.socket:
    """Begin to connect to a ZeroMQ endpoint, without waiting. Raises WireError.

    ZeroMQ would connect again and again, and not say that no process listens there.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    probe = socket.socket(socket.AF_INET6 if "[" in host else socket.AF_INET)
    probe.setblocking(False)
    error = probe.connect_ex((host.strip("[]"), int(port)))
    if error not in (0, errno.EINPROGRESS):
        probe.close()
        raise WireError(f"cannot connect: {os.strerror(error)}")
    return probe


def check_probe(probe: socket.socket) -> None:
    """Raise WireError if a probe has not connected, although it is ready to be written to."""
    if error := probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise WireError(f"cannot connect: {os.strerror(error)}")
