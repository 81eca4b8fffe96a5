"""Pillow's images in messages of `LLM.chat`."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from jaxserve.errors import InvalidRequestError
from jaxserve.llm.generation import with_image_urls


async def test_an_image_becomes_a_url_with_the_same_pixels_and_the_rest_stays() -> None:
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    text = {"type": "text", "text": "What is it?"}
    asked = {"role": "user", "content": [{"type": "image_pil", "image_pil": Image.fromarray(pixels)}, text]}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, asked]
    system, question = await with_image_urls(messages)
    assert system is messages[0] and question["content"][1] is text
    url = question["content"][0]["image_url"]["url"]
    decoded = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    np.testing.assert_array_equal(np.asarray(decoded), pixels)


async def test_a_photo_is_turned_as_its_camera_says() -> None:
    photo, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (30, 20)).save(photo, "JPEG", exif=exif)
    asked = {"role": "user", "content": [{"type": "image_pil", "image_pil": Image.open(photo)}]}
    [question] = await with_image_urls([asked])
    url = question["content"][0]["image_url"]["url"]
    assert Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))).size == (20, 30)


async def test_damage_in_the_exif_of_a_photo_does_not_matter() -> None:
    photo, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make] = 6, "maker"
    damaged = exif.tobytes().replace(b"\x01\x0f\0\x02", b"\x01\x02\0\x02")  # the numbers of bits as a text
    Image.new("RGB", (30, 20)).save(photo, "JPEG", exif=damaged)
    asked = {"role": "user", "content": [{"type": "image_pil", "image_pil": Image.open(photo)}]}
    [question] = await with_image_urls([asked])
    url = question["content"][0]["image_url"]["url"]
    assert Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))).size == (20, 30)


def closed_image() -> Image.Image:
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "JPEG")
    with Image.open(file) as image:
        return image


@pytest.mark.parametrize(
    "image",
    [None, "cat.png", Image.new("CMYK", (2, 2)), closed_image()],
    ids=["nothing", "a name", "CMYK", "a closed file"],
)
async def test_anything_else_is_rejected_by_the_name_of_its_field(image: Any) -> None:
    part = {"type": "image_pil", "image_pil": image}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[0\]\.image_pil"):
        await with_image_urls([{"role": "user", "content": [part]}])
