"""Loads the images of requests: fetches or unpacks them, has them decoded in a separate process, and counts their memory.

The first image starts the process, a fork server.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.checkpoint.preprocessing.videos import read_video_processor
from jaxserve.checkpoint.source import resolve_tower
from jaxserve.config import ImagesConfig
from jaxserve.errors import RateLimitError, UnavailableError, invalid, unsupported
from jaxserve.forkserver.client import ForkServerClient
from jaxserve.frontend.images.fetch import fetch
from jaxserve.frontend.images.protocol import MODULE, DecodeJob, DecodeReply, DecodeSpec, PreparedImage, PreparedItem
from jaxserve.frontend.images.source import ImageSource, is_data, read_data
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.transport import MAX_IMAGE_BYTES
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.preprocessing.videos import VideoProcessorConfig

_MAX_JOBS: Final = 4
"""Largest number of images that are decoded at the same time."""
_MAX_FETCHES: Final = 8


@dataclass(frozen=True, eq=False)
class LoadedImages:
    """The images and videos of one request. Their memory counts until this object is gone."""

    images: tuple[PreparedImage, ...] = ()
    texts: tuple[str, ...] = ()
    """The texts that replace placeholders, one for each image or video."""
    placeholders: tuple[str, ...] = ()
    """Text that the chat template writes for each of them."""
    image_token_id: int = 0
    """Token that stands for one embedding."""
    mark_token_ids: tuple[int, ...] = ()
    """Tokens that stand for learned vectors among those of an image, or for embeddings of videos."""

    @property
    def items(self) -> tuple[PreparedItem, ...]:
        """Inputs of the encoder, in the order of their tokens."""
        return tuple(item for image in self.images for item in image.items)


NO_IMAGES: Final = LoadedImages()


def numbered_texts(images: Sequence[PreparedImage], number: str) -> tuple[str, ...]:
    """Return the texts of images, each after its number in the prompt. number: see `ImageMarkup`."""
    return tuple(number.format(number=index) + image.text for index, image in enumerate(images))


class ImageLoader:
    """Images of one API process. `aclose` ends the decoding process."""

    def __init__(self, config: ImagesConfig) -> None:
        """Raises ConfigError for a limit that is no number."""
        self.config = config
        self._max_images = config.max_images
        self.num_bytes = 0
        """Bytes of the prepared images and of the embeddings of all requests."""
        self._model_path: Path | None = None
        self._mmproj: Path | None = None
        self._processor: ImageProcessorConfig | None = None
        self._videos: VideoProcessorConfig | None = None
        self._decoder = ForkServerClient(
            MODULE, "decodes images", max_jobs=_MAX_JOBS, timeout_s=config.image_decode_timeout
        )
        self._turns = asyncio.Semaphore(_MAX_JOBS)
        """Held from the check of the memory until the image counts: an image that waits for its turn is checked after the wait."""
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)

    def install(self, model_path: Path) -> None:
        """Set the model; called once, when its path is known. The engine decides if its images are served."""
        self._model_path = model_path

    async def load(self, sources: Sequence[ImageSource], info: ImageInfo | None) -> LoadedImages:
        """Return the images of a request, in their order; info: that of the engine.

        Raises InvalidRequestError naming the field of an image that is rejected, and RateLimitError if the images of all
        requests take too much memory: no image is decoded while they are over the limit.
        """
        if not sources:
            return NO_IMAGES
        if info is None:
            reason = "text only (--limit-mm-per-prompt image=0)" if not self._max_images else "text only"
            kind = "a video" if sources[0].is_video else "an image"
            raise unsupported(sources[0].place, f"is {kind}, and this server's model reads {reason}")
        if self._processor is None:
            # A GGUF file's vocabulary takes half a second.
            await asyncio.to_thread(self._read_processor, info.reads_videos)
        processor, videos = self._processor, self._videos
        if processor is None:
            raise UnavailableError("The model is loading.")
        self._check_counts(sources, info)

        def placeholder(source: ImageSource) -> str:
            if not source.is_video:
                return processor.markup.placeholder
            assert videos is not None, "the engine reads what the checkpoint describes"
            return videos.markup.placeholder

        most = min(MAX_IMAGE_BYTES, self.config.max_image_memory)
        images, num_bytes = [], 0
        try:
            for source in sources:  # one after the other: other requests get their turns
                self.require_memory()
                data = await self._read(source)
                async with self._turns:
                    self.require_memory()
                    reply = await self._decoded(source, data, info, is_alone=len(sources) == 1)
                    if reply.image is None:
                        raise invalid(source.place, reply.error or "the image cannot be read")
                    images.append(reply.image)
                    num_bytes += reply.image.num_bytes
                    self.num_bytes += reply.image.num_bytes
                if num_bytes > most:
                    raise invalid(
                        source.place,
                        f"the prepared images of one prompt may take {most} bytes (--max-image-memory), got {num_bytes}",
                    )
            loaded = LoadedImages(
                tuple(images),
                numbered_texts(images, processor.markup.number),
                tuple(placeholder(source) for source in sources),
                processor.image_token_id,
                (*processor.mark_token_ids, *([] if videos is None else [videos.token_id])),
            )
        except BaseException:
            self._release(num_bytes)
            raise
        weakref.finalize(loaded, self._release, num_bytes)
        return loaded

    def _check_counts(self, sources: Sequence[ImageSource], info: ImageInfo) -> None:
        """Raise InvalidRequestError for more images or videos than a prompt may have."""
        for name, most, own in (
            ("images", self.config.max_images, [source for source in sources if not source.is_video]),
            ("videos", self.config.max_videos, [source for source in sources if source.is_video]),
        ):
            if own and name == "videos" and not info.reads_videos:
                raise unsupported(own[0].place, "is a video, and this server reads none of this model (docs/images.md)")
            if len(own) > most:
                named = name.removesuffix("s") if most == 1 else name
                limit = f"a prompt may have at most {most} {named} (--limit-mm-per-prompt), got {len(own)}"
                raise invalid(own[most].place, limit)

    def require_memory(self) -> None:
        """Raise RateLimitError if the inputs of all requests take too much memory."""
        if self.num_bytes > self.config.max_image_memory:
            raise RateLimitError(
                f"The server is busy: the images and embeddings of running requests take {self.num_bytes} bytes, at most "
                f"{self.config.max_image_memory} may be taken (--max-image-memory). Please retry later."
            )

    def hold(self, owner: object, num_bytes: int) -> None:
        """Count the memory of an input until `owner` is gone."""
        self.num_bytes += num_bytes
        weakref.finalize(owner, self._release, num_bytes)

    async def aclose(self) -> None:
        """End the process."""
        await self._decoder.aclose()

    def _read_processor(self, reads_videos: bool) -> None:
        """Read the preprocessing of the model, which the engine has read, too."""
        if self._model_path is not None:
            self._mmproj = resolve_tower(self.config)
            self._processor = read_image_processor(self._model_path, self._mmproj)
            self._videos = read_video_processor(self._model_path) if reads_videos else None

    async def _read(self, source: ImageSource) -> bytes:
        if is_data(source.url):
            return await asyncio.to_thread(read_data, source, self.config.max_image_size)  # 4 ns for each byte
        async with self._fetches:
            return await fetch(source, self.config)

    async def _decoded(self, source: ImageSource, data: bytes, info: ImageInfo, *, is_alone: bool) -> DecodeReply:
        mmproj = None if self._mmproj is None else str(self._mmproj)
        spec = DecodeSpec(str(self._model_path), mmproj, self.config, info.max_patches, info.reads_videos)
        job = DecodeJob(data, source.detail == "low", is_alone, source.is_video)
        try:
            return await self._decoder.ask(job, lambda: spec, DecodeReply)
        except UnavailableError as error:
            raise UnavailableError(f"'{source.place}' was not read. {error.message}", param=source.place) from None

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
