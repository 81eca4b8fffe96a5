"""Loads the images of requests: fetches or unpacks them, has them decoded in a separate process, and counts their memory.

The first image starts the process. If it dies, the next image starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.config import ImagesConfig
from jaxserve.errors import RateLimitError, UnavailableError, invalid, unsupported
from jaxserve.frontend.images.fetch import fetch
from jaxserve.frontend.images.protocol import (
    LENGTH_BYTES,
    MODULE,
    DecodeJob,
    DecodeReply,
    DecodeSpec,
    PreparedImage,
    PreparedItem,
    framed,
)
from jaxserve.frontend.images.source import ImageSource, is_data, read_data
from jaxserve.ipc.messages import ImageInfo
from jaxserve.ipc.transport import MAX_IMAGE_BYTES
from jaxserve.model_config.images import ImageProcessorConfig

_log = logging.getLogger(__name__)

_MAX_JOBS: Final = 4
"""Largest number of images that are decoded at the same time."""
_MAX_FETCHES: Final = 8


@dataclass(frozen=True, eq=False)
class LoadedImages:
    """The images of one request. Their memory counts until this object is gone."""

    images: tuple[PreparedImage, ...] = ()
    placeholder: str = ""
    """Text that the chat template writes for an image."""
    image_token_id: int = 0
    """Token that stands for one embedding."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts that replace placeholders."""
        return tuple(image.text for image in self.images)

    @property
    def items(self) -> tuple[PreparedItem, ...]:
        """Inputs of the encoder, in the order of their tokens."""
        return tuple(item for image in self.images for item in image.items)


NO_IMAGES: Final = LoadedImages()


class ImageLoader:
    """Images of one API process. `aclose` ends the decoding process."""

    def __init__(self, config: ImagesConfig) -> None:
        """Raises ConfigError for a limit that is no number."""
        self.config = config
        self._max_images = config.max_images
        self.num_bytes = 0
        """Bytes of the prepared images of all requests."""
        self._model_path: Path | None = None
        self._processor: ImageProcessorConfig | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._jobs = asyncio.Semaphore(_MAX_JOBS)
        self._fetches = asyncio.Semaphore(_MAX_FETCHES)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[DecodeReply]] = {}

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
            raise unsupported(sources[0].place, f"is an image, and this server's model reads {reason}")
        processor = self._read_processor()
        if len(sources) > self._max_images:
            place, most = sources[self._max_images].place, self._max_images
            raise invalid(place, f"a prompt may have at most {most} images (--limit-mm-per-prompt), got {len(sources)}")
        most = min(MAX_IMAGE_BYTES, self.config.max_image_memory)
        images, num_bytes = [], 0
        try:
            for source in sources:  # one after the other: other requests get their turns
                if self.num_bytes > self.config.max_image_memory:
                    raise self._busy()
                reply = await self._decoded(source, info.max_patches)
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
            loaded = LoadedImages(tuple(images), processor.markup.placeholder, processor.image_token_id)
        except BaseException:
            self._release(num_bytes)
            raise
        weakref.finalize(loaded, self._release, num_bytes)
        return loaded

    async def aclose(self) -> None:
        """End the process."""
        if self._reading is not None:  # first, so that the end of the process is not logged as an error
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _read_processor(self) -> ImageProcessorConfig:
        """Return the preprocessing of the model, which the engine has read, too."""
        if self._processor is None:
            self._processor = None if self._model_path is None else read_image_processor(self._model_path)
            if self._processor is None:
                raise UnavailableError("The model is loading.")
        return self._processor

    async def _decoded(self, source: ImageSource, max_patches: int) -> DecodeReply:
        if is_data(source.url):
            data = read_data(source, self.config.max_image_size)
        else:
            async with self._fetches:
                data = await fetch(source, self.config)
        async with self._jobs:
            return await self._ask(DecodeJob(next(self._numbers), data, source.detail == "low"), max_patches)

    def _release(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def _busy(self) -> RateLimitError:
        return RateLimitError(
            f"The server is busy: the images of running requests take {self.num_bytes} bytes, at most "
            f"{self.config.max_image_memory} may be taken (--max-image-memory). Please retry later."
        )

    async def _ask(self, job: DecodeJob, max_patches: int) -> DecodeReply:
        verdict: asyncio.Future[DecodeReply] = asyncio.get_running_loop().create_future()
        try:
            process = await self._running_process(max_patches)
            self._waiting[job.number] = verdict
            assert process.stdin is not None
            process.stdin.write(framed(job))
            await process.stdin.drain()
            return await verdict
        except (BrokenPipeError, ConnectionResetError):
            raise _gone() from None
        finally:
            self._waiting.pop(job.number, None)

    async def _running_process(self, max_patches: int) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                if self._model_path is None:
                    raise UnavailableError("The model is loading.")
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", MODULE, stdin=pipe, stdout=pipe, start_new_session=True
                )
                assert self._process.stdin is not None
                self._process.stdin.write(framed(DecodeSpec(str(self._model_path), self.config, max_patches)))
                self._waiting = {}
                self._reading = asyncio.create_task(self._read(self._process, self._waiting))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process, waiting: dict[int, asyncio.Future[DecodeReply]]) -> None:
        """Deliver results until the process ends, then fail the jobs that are still `waiting`."""
        assert process.stdout is not None
        try:
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
                    frame = await process.stdout.readexactly(length)
                    reply = msgspec.msgpack.decode(frame, type=DecodeReply)
                    verdict = waiting.pop(reply.number, None)
                    if verdict is not None and not verdict.done():
                        verdict.set_result(reply)
            _log.error("the process that decodes images ended with %s", await process.wait())
        finally:
            for verdict in waiting.values():
                if not verdict.done():
                    verdict.set_exception(_gone())


def _gone() -> UnavailableError:
    return UnavailableError("The process that decodes images ended. Please retry.")
