"""Decode one image file to 8-bit RGB. Runs in a child process under limits, since image decoders meet hostile files.

Right results: EXIF orientation is applied; CMYK, palettes, greyscale and 16 bits become 8-bit RGB; transparent pixels are
shown on white. Rejected: other formats, animations, truncated files, and more pixels than allowed, which are counted from the
header before anything is decompressed.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Final

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
LOW_DETAIL_PIXELS: Final = 512
"""Longest side of an image with low detail."""
MAX_ASPECT_RATIO: Final = 200
_SVG_CHARS: Final = 1024
_TURNS: Final[Mapping[object, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF's numbers of orientations (CIPA DC-008)."""


class ImageError(Exception):
    """An image cannot be read. The message is the rest of a sentence about the field, for the client."""


def decode_image(data: bytes, max_pixels: int, *, low_detail: bool = False) -> Image.Image:
    """Return the image as RGB. Raises ImageError."""
    image = _open(data, max_pixels)
    try:
        image.load()
        image = _to_rgb(upright(image))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, EOFError and others
        raise ImageError(f"the image is damaged or truncated ({reason_of(error)})") from None
    if low_detail:
        image.thumbnail((LOW_DETAIL_PIXELS, LOW_DETAIL_PIXELS), Image.Resampling.LANCZOS)
    return image


def _open(data: bytes, max_pixels: int) -> Image.Image:
    """Return the image with its header read. Raises ImageError."""
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
            # A JPEG with further pictures, as phones write it, is opened as MPO: its first one is the photo.
            is_animated = image.format != "MPO" and getattr(image, "n_frames", 1) > 1
    except UnidentifiedImageError:
        kind = (
            "SVG is not supported" if b"<svg" in data[:_SVG_CHARS].lower() else "this is no image of a supported format"
        )
        raise ImageError(f"{kind}: send PNG, JPEG, WebP, GIF or BMP") from None
    except Image.DecompressionBombError:
        raise ImageError(f"the image has more than {max_pixels} pixels (--max-image-pixels)") from None
    except Exception as error:
        raise ImageError(f"the image is damaged or truncated ({reason_of(error)})") from None
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(
            f"the image has {width} x {height} pixels, at most {max_pixels} are allowed (--max-image-pixels)"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(
            f"the image has {width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times the other"
        )
    if is_animated:
        raise ImageError("animated images are not supported: send one frame")
    return image


def upright(image: Image.Image) -> Image.Image:
    """Return the image turned as its EXIF says. Damage in EXIF, which browsers ignore, too, does not matter."""
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except MemoryError:
        raise
    except Exception:  # of readers of EXIF: SyntaxError, TypeError, struct.error and others
        turn = None
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):  # 16-bit greyscale; `convert` would clip it at 255
        values = np.asarray(image).astype(np.float64)
        image = Image.fromarray(np.clip(np.round(values / 257), 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        opaque = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(opaque, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def reason_of(error: Exception) -> str:
    """Return what a decoder says of a file, in a line."""
    return (str(error) or type(error).__name__)[:200].rstrip(".")
