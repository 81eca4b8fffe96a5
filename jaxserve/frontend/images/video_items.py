"""From a video to encoder items and a text: the frames that are taken, their size, and the time of each group of them.

Frames, sizes and times are those of transformers' processors. Their frames are resized by torchvision, these by Pillow, which
differs by 1 / 255 in a few pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from jaxserve.checkpoint.preprocessing.videos import read_video_processor
from jaxserve.errors import CheckpointError, RequestError
from jaxserve.frontend.images.decode import ImageError
from jaxserve.frontend.images.prepared import prepared_item
from jaxserve.frontend.images.processor import EncoderItem, ProcessedImage, bounded_size, budget_size, cut_patches
from jaxserve.frontend.images.protocol import PreparedImage
from jaxserve.frontend.images.resize import resize
from jaxserve.frontend.images.video import Video, VideoReader, decode_video
from jaxserve.model_config.images import AreaSizes, BudgetSizes, FrameSampling, VideoMarkup, VideoProcessorConfig


def load_video_preparer(path: Path, max_patches: int) -> Callable[[bytes, int], PreparedImage]:
    """Return the function that decodes and prepares videos for the checkpoint at `path`, from a file and the most pixels of a frame.

    max_patches: patches of one item that the engine can encode; frames are reduced to it. Raises CheckpointError.
    """
    config = read_video_processor(path)
    if config is None:
        raise CheckpointError(f"{path}: no video_preprocessor_config.json, which says how videos are prepared")
    reader = video_reader(config, max_patches)

    def prepare(data: bytes, max_pixels: int) -> PreparedImage:
        processed = process_video(decode_video(data, reader, max_pixels), config)
        return PreparedImage(list(map(prepared_item, processed.items)), processed.text)

    return prepare


def video_reader(config: VideoProcessorConfig, max_patches: int) -> VideoReader:
    """Return how a model takes the frames of a video, of which each has up to `max_patches` patches."""

    def reduce(image: Image.Image, count: int) -> Image.Image:
        try:
            height, width = _frame_size(image.height, image.width, count, config, max_patches)
        except RequestError as error:
            raise ImageError(error.message.rstrip(".")) from None
        patches = height * width // config.patch_size**2
        if patches > max_patches:
            raise ImageError(
                f"a frame has {patches} patches, at most {max_patches} can be encoded (--max-image-patches)"
            )
        return resize(image, height, width, config.resampling)

    return VideoReader(lambda count, rate: chosen_frames(count, rate, config.sampling), reduce)


def chosen_frames(count: int, rate: float, sampling: FrameSampling) -> np.ndarray:
    """Return the numbers of the frames that the model sees, int64 (frames,), of `count`, `rate` in a second."""
    wanted = sampling.num_frames
    if wanted is None:
        wanted = min(max(int(count / rate * sampling.fps), sampling.min_frames), sampling.max_frames)
    wanted = min(wanted, count)
    if sampling.has_last:
        return np.linspace(0, count - 1, wanted).round().astype(np.int64)
    return np.arange(wanted, dtype=np.int64) * count // wanted


def process_video(video: Video, config: VideoProcessorConfig) -> ProcessedImage:
    """Cut a video, whose frames have their final size, into groups of frames, which the tower encodes one by one.

    The text stands for all of them.
    """
    frames, seconds = list(video.frames), list(video.seconds)
    short = -len(frames) % config.group  # the last group repeats the last frame
    frames += [frames[-1]] * short
    seconds += [seconds[-1]] * short
    items, texts, markup = [], [], config.markup
    for first in range(0, len(frames), config.group):
        own = slice(first, first + config.group)
        item = _item(list(map(np.asarray, frames[own])), config)
        time = _time((seconds[own][0] + seconds[own][-1]) / 2, markup)
        texts.append(f"{time}{markup.begin}{markup.token * item.num_tokens}{markup.end}")
        items.append(item)
    return ProcessedImage(tuple(items), markup.separator.join(texts))


def _time(seconds: float, markup: VideoMarkup) -> str:
    if markup.time == "clock":
        return f"{int(seconds // 60):02d}:{int(seconds % 60):02d} "
    return f"<{seconds:.1f} seconds>"


def _frame_size(height: int, width: int, count: int, config: VideoProcessorConfig, max_patches: int) -> tuple[int, int]:
    """Return height and width of each frame in pixels."""
    sizes, factor = config.sizes, config.patch_size * config.merge
    if isinstance(sizes, BudgetSizes):
        return budget_size(height, width, config.patch_size, config.merge, min(sizes.max_patches, max_patches))
    most = sizes.max_pixels
    if sizes.most_frame_tokens is not None:
        share = min(sizes.most_frame_tokens * factor**2, sizes.max_pixels // count)
        most = max(share, int(sizes.min_pixels * 1.05)) * count
    own = max_patches * config.patch_size**2
    most = min(most, count * own)
    compared = max(round(count / config.group), 1) * config.group
    area = AreaSizes(min(sizes.min_pixels, most), most, count, enlargement="both", compared_frames=compared)
    size = bounded_size(height, width, factor, area)
    if size[0] * size[1] <= own:
        return size
    return bounded_size(height, width, factor, AreaSizes(1, own, enlargement="both"))  # frames that were rounded away


def _item(frames: list[np.ndarray], config: VideoProcessorConfig) -> EncoderItem:
    """Return a group of frames: of a patch channels, then frames, then rows, then columns."""
    cut = [cut_patches(frame, config.patch_size, config.merge) for frame in frames]
    channels = frames[0].shape[-1]
    patches = np.stack([patches.reshape(len(patches), channels, -1) for patches, _ in cut], axis=2)
    grid = tuple(side // config.patch_size for side in frames[0].shape[:2])
    num_tokens = len(patches) // config.merge**2
    return EncoderItem(patches.reshape(len(patches), -1), cut[0][1], (grid[0], grid[1]), num_tokens)
