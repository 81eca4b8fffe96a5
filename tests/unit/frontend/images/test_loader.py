"""Images of requests are decoded in a separate process, under limits."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.config import ImagesConfig
from jaxserve.errors import InvalidRequestError, RateLimitError, UnavailableError, UnsupportedParameterError
from jaxserve.frontend.images import loader as loader_module
from jaxserve.frontend.images.loader import NO_IMAGES, ImageLoader
from jaxserve.frontend.images.processor import process_image
from jaxserve.frontend.images.protocol import DecodeReply, PreparedImage, PreparedItem
from jaxserve.frontend.images.source import ImageSource
from jaxserve.ipc.image_info import ImageInfo
from tests.models.goldens import DATA
from tests.models.mmproj_files import write_pair
from tests.models.pictures import picture
from tests.unit.frontend.images.test_decode import JPEG, file_of, png

MODEL = DATA / "vision" / "smolvlm_tiny"
INFO = ImageInfo(max_patches=16, max_tokens=4, cache_rows=64, merge=2, patch_bytes=192)

pytestmark = [pytest.mark.slow]


def source(data: bytes, index: int = 0, detail: Any = None) -> ImageSource:
    return ImageSource("data:image/png;base64," + base64.b64encode(data).decode(), f"images[{index}]", detail)


@asynccontextmanager
async def loader(path: Path = MODEL, **settings: Any) -> AsyncIterator[ImageLoader]:
    made = ImageLoader(ImagesConfig(**settings))
    made.install(path)
    try:
        yield made
    finally:
        await made.aclose()


async def test_images_cross_as_the_model_takes_them() -> None:
    image = picture(80, 50, 0)
    config = read_image_processor(MODEL)
    assert config is not None
    expected = process_image(image, config)
    changed = image.copy()
    changed.putpixel((3, 3), (0, 0, 0))
    async with loader() as images:
        loaded = await images.load([source(file_of(image), 0), source(file_of(changed), 1)], INFO)
        first, second = loaded.images
        assert first.text == expected.text and loaded.placeholders == ("<image>", "<image>")
        assert len(first.items) == len(expected.items) > 1
        for item, own in zip(first.items, expected.items, strict=True):
            assert (item.num_tokens, item.grid, item.num_patches) == (own.num_tokens, own.grid, len(own.patches))
            assert item.patches == own.patches.tobytes()
            assert np.array_equal(np.frombuffer(item.positions, "<i4").reshape(-1, 2), own.positions)
        again = await images.load([source(file_of(image, "BMP"))], INFO)
        assert [item.digest for item in again.images[0].items] == [item.digest for item in first.items]
        assert first.items[0].digest != second.items[0].digest  # one changed pixel


async def test_images_of_a_gguf_model_cross_as_its_encoder_file_says(tmp_path: Path) -> None:
    pair, image = write_pair(tmp_path, "qwen2_5_vl_tiny"), picture(80, 50, 0)
    config = read_image_processor(pair.source)
    assert config is not None
    expected = process_image(image, config)
    info = ImageInfo(max_patches=256, max_tokens=64, cache_rows=64, merge=2, patch_bytes=192)
    async with loader(pair.text, mmproj=str(pair.mmproj)) as images:
        loaded = await images.load([source(file_of(image))], info)
        (found,) = loaded.images
        assert found.text == expected.text and loaded.image_token_id == config.image_token_id
        assert [item.patches for item in found.items] == [item.patches.tobytes() for item in expected.items]


async def test_base64_of_a_url_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def watched(source: ImageSource, max_bytes: int) -> bytes:
        threads.append(threading.current_thread())
        raise InvalidRequestError(f"{source.place}: {max_bytes}")

    monkeypatch.setattr(loader_module, "read_data", watched)
    async with loader(max_image_size=7) as images:
        with pytest.raises(InvalidRequestError, match=r"images\[0\]: 7"):
            await images.load([source(b"x" * 100)], INFO)
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_errors_name_the_image_and_the_others_go_on() -> None:
    hostile = {
        "damaged or truncated": JPEG[: len(JPEG) // 2],
        "pixels": png(60_000, 60_000),
        "no image of a supported format": b"hello",
    }
    async with loader() as images:
        good = source(file_of(picture(30, 45, 1)))
        for reason, data in hostile.items():
            wrong = images.load([good, source(data, 1)], INFO)
            outcome, loaded = await asyncio.gather(wrong, images.load([good], INFO), return_exceptions=True)
            assert (
                isinstance(outcome, InvalidRequestError) and outcome.param == "images[1]" and reason in outcome.message
            )
            assert loaded.images  # type: ignore[union-attr]


async def test_a_decoder_that_takes_too_long_or_too_much_is_ended() -> None:
    large = file_of(Image.new("RGB", (4000, 4000)))  # a small file
    async with loader(image_decode_timeout=0.01) as images:
        with pytest.raises(InvalidRequestError, match="image-decode-timeout"):
            await images.load([source(large)], INFO)
    async with loader(image_decode_memory=64 << 20) as images:
        with pytest.raises(InvalidRequestError, match="image-decode-memory"):
            await images.load([source(large)], INFO)
        assert (await images.load([source(JPEG)], INFO)).images


async def test_the_image_whose_decoder_dies_is_named() -> None:
    async with loader() as images:
        await images.load([source(JPEG)], INFO)
        process = images._decoder.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(images.load([source(JPEG, 7)], INFO))
        while not images._decoder._waiting:  # noqa: ASYNC110 until it was sent, another process would be started for it
            await asyncio.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"images\[7\]") as caught:
            await waiting
        assert caught.value.param == "images[7]"


async def test_memory_counts_until_the_images_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loader() as images:
        loaded = await images.load([source(JPEG)], INFO)
        num_bytes = images.num_bytes
        assert num_bytes == sum(image.num_bytes for image in loaded.images) > 0
        images.config = ImagesConfig(max_image_memory=1 << 20)
        images.num_bytes += 1 << 20
        with pytest.raises(RateLimitError, match="max-image-memory"):
            await images.load([source(JPEG)], INFO)
        images.num_bytes -= 1 << 20
        many = [source(file_of(picture(80, 50, seed)), seed) for seed in range(9)]
        before = images.num_bytes
        with pytest.raises(InvalidRequestError, match="no image of a supported format"):
            await images.load([source(JPEG), source(b"hello", 1)], INFO)
        assert images.num_bytes == before  # what was decoded is given back
        monkeypatch.setattr("jaxserve.frontend.images.loader.MAX_IMAGE_BYTES", 3 * num_bytes)
        with pytest.raises(InvalidRequestError, match="of one prompt may take") as caught:
            await images.load(many, INFO)
        assert caught.value.param != many[0].place and images.num_bytes == before
        del loaded
        gc.collect()
        assert images.num_bytes == 0


class HeldDecoder:
    """Answers each job with an image of 600 kB, when it may."""

    def __init__(self) -> None:
        self.has_jobs, self.may_answer = asyncio.Event(), asyncio.Event()

    async def ask(self, *_: object) -> DecodeReply:
        self.has_jobs.set()
        await self.may_answer.wait()
        item = PreparedItem(1, (1, 1), 1, bytes(600_000), b"", b"")
        return DecodeReply(None, PreparedImage([item], "<image>"))

    async def aclose(self) -> None: ...


async def test_images_that_wait_for_the_decoder_are_checked_when_their_turn_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, decoder = 1 << 20, HeldDecoder()
    async with loader(max_image_memory=limit) as images:
        await asyncio.to_thread(images._read_processor, False)  # else the first await is before the first check
        monkeypatch.setattr(images, "_decoder", decoder)
        loads = [asyncio.create_task(images.load([source(JPEG)], INFO)) for _ in range(20)]
        await decoder.has_jobs.wait()
        decoder.may_answer.set()
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert refused and all(isinstance(error, RateLimitError) for error in refused)
        assert (len(outcomes) - len(refused)) * 600_000 == images.num_bytes <= limit + 5 * 600_000


async def test_too_many_images_and_models_without_images_are_refused() -> None:
    async with loader(limit_mm_per_prompt="image=1") as images:
        with pytest.raises(InvalidRequestError, match="at most 1 image ") as caught:
            await images.load([source(JPEG), source(JPEG, 1)], INFO)
        assert caught.value.param == "images[1]"
        with pytest.raises(UnsupportedParameterError, match="reads text only") as caught:
            await images.load([source(JPEG)], None)
        assert await images.load([], None) is NO_IMAGES
        assert images._decoder.process is None  # nothing was decoded
    async with loader(limit_mm_per_prompt="image=0") as images:
        with pytest.raises(UnsupportedParameterError, match="limit-mm-per-prompt image=0"):
            await images.load([source(JPEG)], None)


async def test_images_of_any_size_are_reduced_to_what_the_engine_encodes() -> None:
    async with loader(DATA / "vision" / "qwen3_vl_tiny") as images:
        loaded = await images.load([source(file_of(picture(1300, 700, 0)))], INFO)
    (item,) = loaded.items
    assert 4 <= item.num_patches <= INFO.max_patches
    assert item.grid[0] < item.grid[1]
