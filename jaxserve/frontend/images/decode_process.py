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

_NICENESS: Final = 5


def decoded(job: DecodeJob, prepare: Callable[[Image.Image, bool], PreparedImage], config: ImagesConfig) -> DecodeReply:
    """Return the reply to a job, with the image or the reason why it is rejected."""
    try:
        image = decode_image(job.data, config.max_image_pixels, low_detail=job.low_detail)
        return DecodeReply(None, prepare(image, job.is_alone))
    except ImageError as error:
        return DecodeReply(str(error))


def without_image(is_timeout: bool, config: ImagesConfig) -> DecodeReply:
    """Return the reply to a job whose process was ended."""
    if is_timeout:
        limit = f"{config.image_decode_timeout:g} s of a processor (--image-decode-timeout)"
        return DecodeReply(f"decoding the image took more than {limit}")
    limit = f"{config.image_decode_memory >> 20} MiB (--image-decode-memory)"
    return DecodeReply(f"decoding the image failed: it is damaged, or needs more than {limit}")


def load(spec: DecodeSpec) -> Service[DecodeJob]:
    """Return the service. Raises CheckpointError."""
    mmproj = None if spec.mmproj is None else Path(spec.mmproj)
    config, prepare = spec.config, load_preparer(Path(spec.model_path), spec.max_patches, mmproj)
    return Service(
        DecodeJob,
        run=lambda job: decoded(job, prepare, config),
        reply_without=lambda is_timeout: without_image(is_timeout, config),
        timeout_s=config.image_decode_timeout,
        memory=config.image_decode_memory,
        niceness=_NICENESS,
    )


if __name__ == "__main__":
    serve(load, DecodeSpec)
