"""Decode the frames of a video that a model sees, as 8-bit RGB. Runs in a child process under limits: decoders meet hostile files.

PyAV, FFmpeg's libraries, reads MP4 and MOV, WebM and Matroska, and AVI. Playlists and everything else that names other files is refused
twice: by the first bytes of the file, and by FFmpeg's own lists of formats and protocols.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image

from jaxserve.frontend.images.decode import MAX_ASPECT_RATIO, ImageError, reason_of

_FORMATS: Final = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
_OPTIONS: Final = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
_KINDS: Final = "send MP4, MOV, WebM, Matroska or AVI"
_TURNS: Final = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
"""By degrees counterclockwise."""


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of a video."""

    frames: list[Image.Image]
    seconds: list[float]
    """Time of each frame from the beginning of the video."""
    length: float = 0.0
    """Seconds of the whole video."""


class VideoReader(NamedTuple):
    """The choice of a video's frames, and their size, for a model."""

    choose: Callable[[int, float], np.ndarray]
    """Returns the numbers of the frames, in ascending order, from the number of all frames and of those in a second."""
    reduce: Callable[[Image.Image, int], Image.Image]
    """Returns a frame in its size for the model, from the number of frames that are taken. Raises ImageError."""


def decode_video(data: bytes, reader: VideoReader, max_pixels: int) -> Video:
    """Return the frames of a file that a model sees. max_pixels: those of one frame. Raises ImageError."""
    if not _is_video(data):
        raise ImageError(f"this is no video of a supported format: {_KINDS}")
    import av

    try:
        with av.open(io.BytesIO(data), options=dict(_OPTIONS), metadata_errors="ignore") as container:
            count, rate = _count(container, _stream(container, max_pixels))
        wanted = [int(number) for number in reader.choose(count, rate)]
        while True:
            with av.open(io.BytesIO(data), options=dict(_OPTIONS), metadata_errors="ignore") as container:
                found, num_decoded = _frames(container, wanted, reader, max_pixels)
            if num_decoded > wanted[-1]:
                break
            if not num_decoded:
                raise ImageError("the video has no frames that can be read")
            count = num_decoded  # fewer than there are packets
            wanted = [int(number) for number in reader.choose(count, rate)]
    except (MemoryError, ImageError):
        raise
    except Exception as error:  # FFmpegError, ValueError, and whatever else decoders raise
        raise ImageError(f"the video is damaged, or of a kind that is not supported ({reason_of(error)})") from None
    if len({image.size for image in found.values()}) > 1:
        raise ImageError("the sizes of the frames differ")
    return Video([found[number] for number in wanted], [number / rate for number in wanted], count / rate)


def _is_video(data: bytes) -> bool:
    """Return True if a file begins as MP4 or MOV, Matroska or WebM, or AVI do."""
    is_mov = data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
    return is_mov or data[:4] == b"\x1a\x45\xdf\xa3" or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")


def _stream(container: Any, max_pixels: int) -> Any:
    """Return the stream of the film, not that of a picture beside it. Raises ImageError."""
    stream = container.streams.best("video")
    if stream is None:
        raise ImageError("the file has no video stream")
    if stream.codec_context is None:
        raise ImageError("the codec of the video is not supported")
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > max_pixels:
        raise ImageError(
            f"a frame has {width} x {height} pixels, at most {max_pixels} are allowed (--max-image-pixels)"
        )
    if not width or not height or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(f"a frame has {width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times the other")
    return stream


def _count(container: Any, stream: Any) -> tuple[int, float]:
    """Return the number of frames that are shown, one in each packet, and of those in a second. Raises ImageError."""
    count, times = 0, []
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            count += 1
            times += [packet.pts] if packet.pts is not None else []
    rate = float(stream.average_rate or 0)
    if not rate and len(times) > 1 and max(times) > min(times):  # WebM with times alone
        rate = (len(times) - 1) / float((max(times) - min(times)) * stream.time_base)
    if not count:
        raise ImageError("the video has no frames")
    return count, rate or 1.0


def _frames(
    container: Any, wanted: list[int], reader: VideoReader, max_pixels: int
) -> tuple[dict[int, Image.Image], int]:
    """Return frames by their numbers, each in its size for the model, and how many were decoded up to the last of them."""
    found: dict[int, Image.Image] = {}
    number = -1
    for number, frame in enumerate(container.decode(_stream(container, max_pixels))):
        if number in wanted:
            if frame.width * frame.height > max_pixels:
                raise ImageError(f"a frame has {frame.width} x {frame.height} pixels (--max-image-pixels)")
            image = Image.fromarray(frame.to_ndarray(format="rgb24", threads=1))
            turn = _TURNS.get(frame.rotation % 360)
            found[number] = reader.reduce(image if turn is None else image.transpose(turn), len(wanted))
        if number >= wanted[-1]:
            break
    return found, number + 1
