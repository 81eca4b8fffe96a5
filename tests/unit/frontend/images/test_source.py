"""Sources of images: the URLs that are read, and the hosts that are fetched from."""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from jaxserve.config import ImagesConfig
from jaxserve.errors import ConfigError, InvalidRequestError, UnsupportedParameterError
from jaxserve.frontend.images import base64_parts
from jaxserve.frontend.images.fetch import PrivateAddressError, PublicResolver, fetch, is_public
from jaxserve.frontend.images.source import ImageSource, read_data, read_url

PLACE = "messages[0].content[0].image_url.url"


def source(url: str) -> ImageSource:
    return ImageSource(url, PLACE)


def test_long_base64_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = base64.b64decode

    def counted(text: str, *, validate: bool) -> bytes:
        sizes.append(len(text))
        return decode(text, validate=validate)

    content = bytes(range(256)) * 5000
    text = base64.b64encode(content).decode()
    monkeypatch.setattr(base64, "b64decode", counted)
    assert base64_parts.decode_base64(text) == content
    assert len(sizes) > 5
    assert max(sizes) <= base64_parts.PART_CHARS
    monkeypatch.setattr(base64_parts, "PART_CHARS", 8)
    assert [base64_parts.decode_base64(text[:end]) for end in (0, 8, 16)] == [b"", content[:6], content[:12]]
    assert base64_parts.decode_base64("AAAAAAAAAA==") == bytes(7)
    for wrong in ("AAAAAAA=AAAA", "AAAA AAAAAAA", "AAAAAAAAA", "AAAAAAAAAA", "AAAAAAAA\n"):
        for decoder in (lambda text: decode(text, validate=True), base64_parts.decode_base64):
            with pytest.raises(binascii.Error):
                decoder(wrong)


def test_data_url_is_decoded() -> None:
    content = base64.b64encode(b"picture").decode()
    for header in ("data:image/png;base64,", "DATA:image/jpeg;BASE64,", "data:;base64,"):
        assert read_data(source(header + content), 100) == b"picture"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64", "base64"),
        ("data:" + "x" * 1000 + ";base64,AAAA", "base64"),
        ("data:image/png;base64,A!AA", "not base64"),
        ("data:image/png;base64,A", "not base64"),
        ("data:image/png;base64,AAAA\nAAAA", "without line breaks"),
        ("data:image/png;base64,", "the image is empty"),
        ("data:image/svg+xml;base64,AAAA", "SVG"),
        ("data:image/png;base64," + "A" * 1000, "at most 100 bytes"),
    ],
)
def test_data_url_that_cannot_be_read_names_its_field(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read_data(source(url), 100)
    assert caught.value.param == PLACE


def test_no_url_is_fetched_unless_its_host_is_allowed() -> None:
    with pytest.raises(UnsupportedParameterError, match="allowed-media-domains"):
        read_url(source("https://example.org/a.png"), ())
    assert read_url(source("https://example.org/a.png"), {"example.org"}).host == "example.org"
    assert read_url(source("http://127.0.0.1:81/a.png"), {"127.0.0.1:81"}).port == 81
    with pytest.raises(InvalidRequestError, match=r"the host '127\.0\.0\.1:82' is not one"):
        read_url(source("http://127.0.0.1:82/a.png"), {"127.0.0.1:81"})


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.org/a.png",
        "example.org/a.png",
        "https://example.org.evil.net/a.png",
        "https://evil.net/example.org",
        "https://evil.net#example.org",
        "https://example.org@evil.net/",
        "https://evil.net\\@example.org/",
        "https://user:password@example.org/a.png",
        "https://example.org:8443/a.png",
        "https:///a.png",
        "https://[::1/a.png",
        "https://[::ffff:127.0.0.1]/a.png",
        "http://2130706433/a.png",
        "http://0x7f.1/a.png",
    ],
)
def test_urls_of_other_hosts_schemes_and_ports_are_rejected(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_url(source(url), {"example.org"})
    assert caught.value.param == PLACE


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "::",
        "192.0.0.192", "168.63.129.16", "fec0::1", "64:ff9b:1::a00:1", "::10.0.0.1", "::ffff:0:10.0.0.1", "3fff::1", "5f00::1",
    ],
)  # fmt: skip
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_are_public() -> None:
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1:248:1893:25c8:1946")
    assert is_public("::ffff:93.184.216.34") and is_public("64:ff9b::5db8:d822") and is_public("2002:5db8:d822::1")


async def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers(host: str, port: int, **_: Any) -> list[Any]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("93.184.216.34", "10.0.0.1")
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answers)
    with pytest.raises(PrivateAddressError):
        await PublicResolver().resolve("rebinding.example", 443)
    config = ImagesConfig(allowed_media_domains="rebinding.example")
    with pytest.raises(InvalidRequestError, match="not public"):
        await fetch(source("https://rebinding.example/a.png"), config)


@asynccontextmanager
async def host() -> AsyncIterator[int]:
    """Serve files on a loopback port."""
    end = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/redirect":
                raise web.HTTPFound("http://169.254.169.254/latest/meta-data")
            case "/missing":
                raise web.HTTPNotFound
            case "/large":
                return web.Response(body=b"x" * 5000)
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(100):
                    await response.write(b"x" * 1000)
                return response
            case "/silent":
                await end.wait()
        assert "cookie" not in request.headers and request.headers["accept-encoding"] == "identity"
        return web.Response(body=b"picture", headers={"Set-Cookie": "a=b"})

    application = web.Application()
    application.router.add_get("/{path}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    finally:
        end.set()
        await runner.cleanup()


async def test_fetching_is_limited() -> None:
    async with host() as port:
        config = ImagesConfig(allowed_media_domains=f"127.0.0.1:{port}", max_image_size=4000)
        address = f"http://127.0.0.1:{port}"
        assert await fetch(source(f"{address}/picture"), config) == b"picture"
        for path, reason in {
            "redirect": "redirect, which is not followed",
            "missing": "status 404",
            "large": "at most 4000 bytes",
            "endless": "at most 4000 bytes",
        }.items():
            with pytest.raises(InvalidRequestError, match=reason) as caught:
                await fetch(source(f"{address}/{path}"), config)
            assert caught.value.param == PLACE
        impatient = ImagesConfig(allowed_media_domains=f"127.0.0.1:{port}", image_fetch_timeout=0.1)
        with pytest.raises(InvalidRequestError, match="did not arrive within"):
            await fetch(source(f"{address}/silent"), impatient)
    with pytest.raises(InvalidRequestError, match="could not be fetched"):
        await fetch(source(f"{address}/picture"), config)


@pytest.mark.parametrize(("text", "count"), [("image=4", 4), ('{"image": 0}', 0), ("{}", 16), ("", 16)])
def test_limit_of_images(text: str, count: int) -> None:
    assert ImagesConfig(limit_mm_per_prompt=text).max_images == count


@pytest.mark.parametrize("text", ["4", "image=x", "image=-1", "video=-1", "audio=1", "[1]", '{"image": null}'])
def test_limit_that_is_no_number_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
        ImagesConfig(limit_mm_per_prompt=text)
