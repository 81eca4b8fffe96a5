"""Image files, hostile ones among them, become RGB or an error."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageCms, ImageOps

from jaxserve.frontend.images.decode import ImageError, decode_image

MOST = 1 << 20
RED = (200, 10, 20)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """A PNG whose header says anything."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats_become_rgb(kind: str) -> None:
    image = decode_image(file_of(Image.new("RGB", (6, 4), RED), kind), MOST)
    assert (image.mode, image.size) == ("RGB", (6, 4))
    assert np.abs(np.asarray(image).astype(int) - RED).max() <= 4  # JPEG and WebP lose a little


def test_cmyk_is_converted() -> None:
    image = decode_image(file_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), MOST)
    red, green, blue = np.asarray(image)[4, 4].tolist()
    assert image.mode == "RGB" and red > 200 and green < 60 and blue < 60


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257 * 50, 257 * 128, 65535]], np.uint16)
    image = decode_image(file_of(Image.fromarray(values)), MOST)
    assert np.asarray(image)[0].tolist() == [[0] * 3, [50] * 3, [128] * 3, [255] * 3]


def test_transparent_pixels_are_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (*RED, 255))
    assert np.asarray(decode_image(file_of(image), MOST))[0].tolist() == [[255, 255, 255], list(RED)]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0, *RED])
    palette.putpixel((1, 0), 1)
    shown = np.asarray(decode_image(file_of(palette, transparency=0), MOST))[0].tolist()
    assert shown == [[255, 255, 255], list(RED)]


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (4, 2), RED)
    image.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    turned = decode_image(file_of(image, exif=exif), MOST)
    assert turned.size == (2, 4)
    assert turned.getpixel((1, 0)) == (0, 0, 255)


@pytest.mark.parametrize("turn", range(1, 10))
def test_damage_in_exif_does_not_matter(turn: int) -> None:
    image, exif = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3)), Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make] = turn, "maker"
    whole = file_of(image, exif=exif)
    # The numbers of bits as a text, which Pillow cannot write again.
    damaged = file_of(image, exif=exif.tobytes().replace(b"\x01\x0f\0\x02", b"\x01\x02\0\x02"))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(whole)))
    for file in (whole, damaged):
        assert np.array_equal(np.asarray(decode_image(file, MOST)), np.asarray(expected))
    unreadable = file_of(image, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01")
    assert np.array_equal(np.asarray(decode_image(unreadable, MOST)), np.asarray(image))


def test_low_detail_reduces_large_images_only() -> None:
    assert decode_image(file_of(Image.new("RGB", (1000, 500))), MOST, low_detail=True).size == (512, 256)
    assert decode_image(file_of(Image.new("RGB", (100, 50))), MOST, low_detail=True).size == (100, 50)


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (0, 128, 255)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


JPEG = file_of(Image.new("RGB", (64, 64), RED), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no image of a supported format"),
        (b"hello", "no image of a supported format"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG is not supported"),
        (b"%PDF-1.7", "no image of a supported format"),
        (file_of(Image.new("RGB", (4, 4)), "TIFF"), "no image of a supported format"),
        (animated("GIF"), "animated"),
        (animated("PNG"), "animated"),
        (animated("WEBP"), "animated"),
        (JPEG[: len(JPEG) // 2], "damaged or truncated"),
        (png(8, 8), "damaged or truncated"),
        (png(8, 8, b"rubbish"), "damaged or truncated"),
        (png(60_000, 60_000), "pixels"),  # 10 GB from a header of 60 bytes
        (png(2_000_000, 1), "pixels"),
        (png(1024, 1025), "1049600|1024 x 1025 pixels, at most 1048576"),
        (png(2010, 10), "over 200 times"),
    ],
)
def test_files_that_are_no_right_image_are_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decode_image(data, MOST)


def test_a_bomb_in_a_text_chunk_is_rejected() -> None:
    text = zlib.compress(b"x" * (80 << 20))
    body = b"comment\0\0" + text
    chunk = struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body))
    image = file_of(Image.new("RGB", (4, 4), RED))
    with pytest.raises(ImageError, match="damaged or truncated"):
        decode_image(image[:33] + chunk + image[33:], MOST)


def test_a_colour_profile_changes_nothing() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert decode_image(file_of(Image.new("RGB", (1, 1), RED), icc_profile=profile), MOST).getpixel((0, 0)) == RED
