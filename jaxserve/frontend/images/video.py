"""Decode the frames of a video that a model sees, as 8-bit RGB. Runs in a child process under limits: decoders meet hostile files.

PyAV, FFmpeg's libraries, reads MP4 and MOV, WebM and Matroska, and AVI. Playlists and everything else that names other files is refused
twice: by the first bytes of the file, and by FFmpeg's own lists of formats and protocols.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from PIL import Image

from jaxserve.frontend.images.decode import MAX_ASPECT_RATIO, ImageError, reason_of

_FORMATS: Final = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
_OPTIONS: Final = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
_KINDS: Final = "send MP4, MOV, WebM, Matroska or AVI"


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of a video."""

    frames: list[Image.Image]
    seconds: list[float]
    """Time of each frame from the beginning of the video."""


def decode_video(data: bytes, choose: Callable[[int, float], np.ndarray], max_pixels: int) -> Video:
    """Return the frames that `choose` takes, from the number of frames and of frames in a second. Raises ImageError.

    choose: returns the numbers of frames, in ascending order; a number may repeat. max_pixels: those of one frame.
    """
    if not _is_video(data):
        raise ImageError(f"this is no video of a supported format: {_KINDS}")
    import av

    try:
        with av.open(io.BytesIO(data), options=dict(_OPTIONS)) as container:
            return _frames(container, choose, max_pixels)
    except (MemoryError, ImageError):
        raise
    except Exception as error:  # FFmpegError, ValueError, and whatever else decoders raise
        raise ImageError(f"the video is damaged, or of a kind that is not supported ({reason_of(error)})") from None


def _is_video(data: bytes) -> bool:
    """Return True if a file begins as MP4 or MOV, Matroska or WebM, or AVI do."""
    is_mov = data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
    return is_mov or data[:4] == b"\x1a\x45\xdf\xa3" or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")


def _frames(container: Any, choose: Callable[[int, float], np.ndarray], max_pixels: int) -> Video:
    if not container.streams.video:
        raise ImageError("the file has no video stream")
    stream = container.streams.video[0]
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > max_pixels:
        raise ImageError(
            f"a frame has {width} x {height} pixels, at most {max_pixels} are allowed (--max-image-pixels)"
        )
    if not width or not height or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(f"a frame has {width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times the other")
    rate = float(stream.average_rate or 0)
    count = stream.frames or _count(container, stream)
    if not rate or not count:
        raise ImageError("the video does not say how many frames it has in a second, or has none")
    wanted = [int(number) for number in choose(count, rate)]
    found: dict[int, Image.Image] = {}
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            if frame.width * frame.height > max_pixels:
                raise ImageError(f"a frame has {frame.width} x {frame.height} pixels (--max-image-pixels)")
            found[number] = Image.fromarray(frame.to_ndarray(format="rgb24"))
        if number >= wanted[-1]:
            break
    if missing := [number for number in wanted if number not in found]:
        raise ImageError(f"the video is truncated: frame {missing[0]} of {count} cannot be read")
    sizes = {image.size for image in found.values()}
    if len(sizes) > 1:
        raise ImageError("the sizes of the frames differ")
    return Video([found[number] for number in wanted], [number / rate for number in wanted])


def _count(container: Any, stream: Any) -> int:
    """Return the number of frames of a file that does not say it, such as WebM: one in each packet."""
    count = sum(1 for packet in container.demux(stream) if packet.size)
    container.seek(0)
    return count
