"""TLS on the port: certificates that change while connections are open, clients that need one, and wrong files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from jaxserve.config import ConnectionConfig
from jaxserve.config.tls import TlsConfig
from jaxserve.errors import ConfigError
from jaxserve.http.listener import NUM_SURPLUS, HttpServer, bind_sockets, listening
from jaxserve.http.sockets.tls import CHECK_S, file_changes, tls_context
from tests.loop_clock import LoopClock

if TYPE_CHECKING:
    import trustme


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return make_authority()


def make_authority() -> trustme.CA:
    import trustme

    return trustme.CA()


def write_pair(certificate: trustme.LeafCert, folder: Path) -> TlsConfig:
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(key)
    return TlsConfig(ssl_certfile=str(chain), ssl_keyfile=str(key))


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@contextlib.asynccontextmanager
async def serving(config: TlsConfig, *listeners: socket.socket) -> AsyncIterator[tuple[HttpServer, str]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.scheme)

    app = web.Application()
    app.router.add_get("/", answer)
    with bind_sockets("127.0.0.1", 0, 1)[0] as listener:
        limits, tls = ConnectionConfig(), tls_context(config)
        async with listening(app, [listener, *listeners], limits, max_connections=8, tls=tls) as server:
            yield server, f"127.0.0.1:{listener.getsockname()[1]}"


async def ask(url: str, tls: ssl.SSLContext | bool = True, **options: object) -> str:
    async with aiohttp.ClientSession(**options) as client, client.get(url, ssl=tls) as response:  # type: ignore[arg-type]
        return await response.text()


async def serial(address: str, tls: ssl.SSLContext) -> object:
    """Return the serial number of the certificate that a new connection gets."""
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        return writer.get_extra_info("peercert")["serialNumber"]
    finally:
        writer.close()
        await writer.wait_closed()


async def test_the_port_speaks_https_only_and_the_operators_socket_http(authority: trustme.CA, tmp_path: Path) -> None:
    config, path = write_pair(authority.issue_cert("127.0.0.1"), tmp_path), str(tmp_path / "operator.sock")
    with socket.socket(socket.AF_UNIX) as operators:
        operators.bind(path)
        operators.setblocking(False)
        async with serving(config, operators) as (_, address):
            assert await ask(f"https://{address}/", trusting(authority)) == "https"
            with pytest.raises(aiohttp.ClientError):
                await ask(f"http://{address}/")
            assert await ask("http://localhost/", connector=aiohttp.UnixConnector(path)) == "http"


async def test_new_connections_get_the_new_certificate_and_open_ones_go_on(
    authority: trustme.CA, tmp_path: Path
) -> None:
    config, trust = write_pair(authority.issue_cert("127.0.0.1"), tmp_path), trusting(authority)
    async with serving(config) as (server, address), aiohttp.ClientSession() as client:
        async with client.get(f"https://{address}/", ssl=trust) as response:
            assert response.status == 200
        old = await serial(address, trust)
        renewed = tls_context(write_pair(authority.issue_cert("127.0.0.1"), tmp_path))
        assert renewed is not None
        server.replace_tls(renewed)
        assert await serial(address, trust) != old
        assert server.num_connections == 1
        async with client.get(f"https://{address}/", ssl=trust) as response:
            assert response.status == 200
        assert server.num_connections == 1, "the same connection"
        assert server.release_idle() == [], "its keys are in this process"


async def test_a_connection_counts_while_it_shakes_hands(authority: trustme.CA, tmp_path: Path) -> None:
    """A server that another one replaces stays until it has none."""
    config = write_pair(authority.issue_cert("127.0.0.1"), tmp_path)
    async with serving(config) as (server, address):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):
            while not server.num_connections:  # noqa: ASYNC110  (nothing announces it)
                await asyncio.sleep(0.001)
            server.stop_accepting()
            assert server.num_connections == 1
        while server.num_connections:  # noqa: ASYNC110  (nothing announces it)
            await asyncio.sleep(0.001)


async def test_connections_that_shake_hands_are_limited(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.http.listener.HANDSHAKE_TIMEOUT_S", 600.0)
    config = write_pair(authority.issue_cert("127.0.0.1"), tmp_path)
    async with serving(config) as (_, address):
        host, port = address.split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(8 + NUM_SURPLUS + 1)]
        assert await asyncio.wait_for(opened[-1][0].read(), 60) == b""
        assert not any(reader.at_eof() for reader, _ in opened[:-1])
        for _, writer in opened:
            writer.close()


async def test_clients_need_a_certificate_of_the_authorities(authority: trustme.CA, tmp_path: Path) -> None:
    pair, clients = write_pair(authority.issue_cert("127.0.0.1"), tmp_path), make_authority()
    clients.cert_pem.write_to_path(tmp_path / "clients.pem")
    config = TlsConfig(
        ssl_certfile=pair.ssl_certfile, ssl_keyfile=pair.ssl_keyfile, ssl_ca_certs=str(tmp_path / "clients.pem")
    )
    known, strange = trusting(authority), trusting(authority)
    clients.issue_cert("client.example").configure_cert(known)
    make_authority().issue_cert("client.example").configure_cert(strange)
    async with serving(config) as (_, address):
        assert await ask(f"https://{address}/", known) == "https"
        for refused in (strange, trusting(authority)):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await ask(f"https://{address}/", refused)


async def test_changed_files_are_noticed_and_so_is_a_wish(authority: trustme.CA, tmp_path: Path) -> None:
    config, clock, asked = write_pair(authority.issue_cert("127.0.0.1"), tmp_path), LoopClock(), asyncio.Event()
    changes = file_changes(config, asked)
    found = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    await clock.advance(CHECK_S)
    assert not found.done()
    assert config.ssl_keyfile is not None
    os.unlink(config.ssl_keyfile)
    await clock.advance(CHECK_S)
    await asyncio.wait_for(found, 60)
    found = asyncio.ensure_future(anext(changes))
    asked.set()
    await asyncio.wait_for(found, 60)


def test_wrong_files_are_named_in_one_line(authority: trustme.CA, tmp_path: Path) -> None:
    right, other = tmp_path / "right", tmp_path / "other"
    right.mkdir()
    other.mkdir()
    config = write_pair(authority.issue_cert("127.0.0.1"), right)
    stranger = write_pair(authority.issue_cert("127.0.0.1"), other)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    missing = str(tmp_path / "missing.pem")
    for wrong, complaint in (
        (TlsConfig(ssl_certfile=missing), "No such file or directory"),
        (TlsConfig(ssl_certfile=str(text)), "no certificate or no key in PEM form"),
        (TlsConfig(ssl_certfile=config.ssl_certfile), "no certificate or no key in PEM form"),
        (
            TlsConfig(ssl_certfile=config.ssl_certfile, ssl_keyfile=stranger.ssl_keyfile),
            "the key is not the certificate's",
        ),
    ):
        with pytest.raises(ConfigError, match=complaint) as error:
            tls_context(wrong)
        assert str(error.value).startswith(f"--ssl-certfile {wrong.ssl_certfile}")
    authorities = TlsConfig(ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile, ssl_ca_certs=str(text))
    with pytest.raises(ConfigError, match=r"--ssl-ca-certs .*no certificate"):
        tls_context(authorities)
    assert tls_context(TlsConfig()) is None
    with pytest.raises(ConfigError, match=r"--ssl-keyfile key\.pem: needs --ssl-certfile"):
        TlsConfig(ssl_keyfile="key.pem")
