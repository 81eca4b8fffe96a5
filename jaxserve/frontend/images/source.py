"""Sources of a prompt's images: `data:` URLs, and URLs of the hosts that the operator allows. Nothing else is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from yarl import URL

from jaxserve.errors import InvalidRequestError, invalid, unsupported
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.images.base64_parts import decode_base64

ImageDetail = Literal["auto", "low", "high", "original"]

_DATA: Final = "data:"
_HEADER_CHARS: Final = 256
"""Longest part of a `data:` URL before its content."""
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One image or video of a prompt, as the caller gave it."""

    url: str
    place: str
    """The field of the request, for error texts."""
    detail: ImageDetail | None = None
    """`low`: the image is reduced to 512 x 512 pixels before the model's processor sees it; all else: it is not."""
    is_video: bool = False


def is_data(url: str) -> bool:
    """Return True for a `data:` URL."""
    return url[: len(_DATA)].lower() == _DATA


def read_data(source: ImageSource, max_bytes: int) -> bytes:
    """Return the content of a `data:` URL with base64. Raises InvalidRequestError."""
    end = source.url.find(",", 0, _HEADER_CHARS)
    header = source.url[len(_DATA) : end].lower() if end >= 0 else ""
    if not header.endswith(";base64"):
        kind = "video" if source.is_video else "image"
        raise invalid(source.place, f"a data: URL must be data:{kind}/TYPE;base64,CONTENT")
    if header.startswith("image/svg"):
        raise svg_error(source.place)
    if (len(source.url) - end) * 3 // 4 > max_bytes + 3:
        raise too_large(source.place, max_bytes)
    try:
        data = decode_base64(source.url[end + 1 :])
    except ValueError:
        raise invalid(
            source.place, "its content is not base64 of the standard alphabet, padded and without line breaks"
        ) from None
    if not data:
        raise invalid(source.place, f"the {'video' if source.is_video else 'image'} is empty")
    if len(data) > max_bytes:
        raise too_large(source.place, max_bytes)
    return data


def read_url(source: ImageSource, domains: Collection[str]) -> URL:
    """Return the URL to fetch. Raises InvalidRequestError unless its host is one of `domains`."""
    scheme = source.url.split(":", 1)[0].lower()
    if scheme not in _PORTS:
        raise invalid(
            source.place,
            f"must be a data: URL or, if --allowed-media-domains names the host, an http(s) URL, got {shorten(source.url)}",
        )
    if not domains:
        raise unsupported(
            source.place,
            "holds a URL, and this server fetches none (--allowed-media-domains): send it as a data: URL",
        )
    try:
        url = URL(source.url)
        host, port = (url.host or "").lower(), url.port
    except ValueError:
        raise invalid(source.place, f"is no valid URL: {shorten(source.url)}") from None
    if url.user is not None or url.password is not None:
        raise invalid(source.place, "a URL must not hold a user or a password")
    shown_host = f"[{host}]" if ":" in host else host
    allowed = f"{shown_host}:{port}" in domains or (
        port == _PORTS[url.scheme] and (host in domains or shown_host in domains)
    )
    if not host or not allowed:
        shown = host if port == _PORTS[url.scheme] else f"{shown_host}:{port}"
        raise invalid(
            source.place,
            f"the host {shorten(shown)} is not one that this server fetches from (--allowed-media-domains)",
        )
    return url


def too_large(place: str, max_bytes: int) -> InvalidRequestError:
    """Return the error of a file over the limit."""
    return invalid(place, f"an image or a video may have at most {max_bytes} bytes (--max-image-size)")


def svg_error(place: str) -> InvalidRequestError:
    """Return the error of an SVG: a program that draws, not pixels."""
    return invalid(place, "SVG is not supported: send PNG, JPEG, WebP, GIF or BMP")
