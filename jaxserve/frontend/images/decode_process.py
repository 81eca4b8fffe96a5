"""Decodes images of requests: `python -m jaxserve.frontend.images.decode_process`, a fork server of an API process.

An image whose decoder takes too much time or memory, or crashes, counts as too costly or damaged; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from PIL import Image

from jaxserve.config import ImagesConfig
from jaxserve.forkserver.serve import Service, serve
from jaxserve.frontend.images.decode import ImageError, decode_image
from jaxserve.frontend.images.prepared import load_preparer
from jaxserve.frontend.images.protocol import DecodeJob, DecodeReply, DecodeSpec, PreparedImage
from jaxserve.frontend.images.videos.items import load_video_preparer

_NICENESS: Final = 5


def decoded(
    job: DecodeJob,
    prepare: Callable[[Image.Image, bool], PreparedImage],
    prepare_video: Callable[[bytes, int], PreparedImage] | None,
    config: ImagesConfig,
) -> DecodeReply:
    """Return the reply to a job, with the image or the reason why it is rejected. prepare_video: None if videos are not served."""
    try:
        if job.is_video:
            assert prepare_video is not None, "videos are served"
            return DecodeReply(None, prepare_video(job.data, config.max_image_pixels))
        image = decode_image(job.data, config.max_image_pixels, low_detail=job.low_detail)
        return DecodeReply(None, prepare(image, job.is_alone))
    except ImageError as error:
        return DecodeReply(str(error))


def without_image(is_timeout: bool, config: ImagesConfig) -> DecodeReply:
    """Return the reply to a job whose process was ended."""
    if is_timeout:
        limit = f"{config.image_decode_timeout:g} s of a processor (--image-decode-timeout)"
        return DecodeReply(f"decoding it took more than {limit}")
    limit = f"{config.image_decode_memory >> 20} MiB (--image-decode-memory)"
    return DecodeReply(f"decoding failed: the file is damaged, or needs more than {limit}")


def load(spec: DecodeSpec) -> Service[DecodeJob]:
    """Return the service. Raises CheckpointError."""
    mmproj = None if spec.mmproj is None else Path(spec.mmproj)
    path, config = Path(spec.model_path), spec.config
    prepare, prepare_video = load_preparer(path, spec.max_patches, mmproj), None
    if spec.has_videos:
        prepare_video = load_video_preparer(path, spec.max_patches)
    return Service(
        DecodeJob,
        run=lambda job: decoded(job, prepare, prepare_video, config),
        reply_without=lambda is_timeout: without_image(is_timeout, config),
        timeout_s=config.image_decode_timeout,
        memory=config.image_decode_memory,
        niceness=_NICENESS,
    )


if __name__ == "__main__":
    serve(load, DecodeSpec)
