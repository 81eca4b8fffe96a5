"""From a video to encoder items and a text: the frames that are taken, their size, and the time of each group of them.

Frames, sizes and times are those of transformers' processors. Their frames are resized by torchvision, these by Pillow, which
differs by 1 / 255 in a few pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from jaxserve.checkpoint.preprocessing.videos import read_video_processor
from jaxserve.errors import CheckpointError, RequestError
from jaxserve.frontend.images.decode import ImageError
from jaxserve.frontend.images.patches import as_read, cut_patches
from jaxserve.frontend.images.prepared import prepared_item
from jaxserve.frontend.images.processor import EncoderItem, ProcessedImage, bounded_size, budget_size
from jaxserve.frontend.images.protocol import PreparedImage
from jaxserve.frontend.images.resize import resize
from jaxserve.frontend.images.videos.decode import Video, VideoReader, decode_video
from jaxserve.frontend.images.videos.frames import chosen_frames
from jaxserve.model_config.preprocessing.images import AreaSizes, BudgetSizes
from jaxserve.model_config.preprocessing.videos import (
    FrameArea,
    SquareFrames,
    VideoArea,
    VideoMarkup,
    VideoProcessorConfig,
)


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
        patches = height * width // config.patch_size**2 + config.has_class_token
        if patches > max_patches:
            raise ImageError(
                f"a frame has {patches} patches, at most {max_patches} can be encoded (--max-image-patches)"
            )
        return resize(image, height, width, config.resampling)

    return VideoReader(lambda count, rate: chosen_frames(count, rate, config.sampling), reduce)


def process_video(video: Video, config: VideoProcessorConfig) -> ProcessedImage:
    """Cut a video, whose frames have their final size, into groups of frames, which the tower encodes one by one.

    The text stands for all of them.
    """
    frames, seconds = list(video.frames), list(video.seconds)
    short = -len(frames) % config.group  # the last group repeats the last frame
    frames += [frames[-1]] * short
    seconds += [seconds[-1]] * short
    groups = [slice(first, first + config.group) for first in range(0, len(frames), config.group)]
    times = _times(config, video, len(groups))
    items = [_item(list(map(np.asarray, frames[own])), time, config) for own, time in zip(groups, times, strict=True)]
    text = _text([item.num_tokens for item in items], [seconds[own] for own in groups], config.markup)
    return ProcessedImage(tuple(items), text)


def _text(counts: Sequence[int], seconds: Sequence[Sequence[float]], markup: VideoMarkup) -> str:
    """Return the text of a video. counts: tokens of each group; seconds: times of its frames."""
    if markup.time == "none":
        return f"{markup.begin}{markup.token * sum(counts)}{markup.end}"
    texts = []
    for index, (count, own) in enumerate(zip(counts, seconds, strict=True)):
        before, after = _time(index, own, markup)
        texts.append(f"{before}{markup.begin}{markup.token * count}{markup.end}{after}")
    return markup.separator.join(texts)


def _times(config: VideoProcessorConfig, video: Video, count: int) -> list[int | None]:
    """Return `EncoderItem.time` of each of `count` groups. A group stands for its share of the video's seconds."""
    if config.times is None:
        return [None] * count
    per_second = config.times.per_second
    each = 1.0 if per_second is None else per_second * config.group * video.length / len(video.frames)
    return [None, *(int(number * np.float32(each)) for number in range(1, count))]


def _time(index: int, seconds: Sequence[float], markup: VideoMarkup) -> tuple[str, str]:
    """Return the texts before and after a group of frames. seconds: their times."""
    middle = (seconds[0] + seconds[-1]) / 2
    match markup.time:
        case "clock":
            return f"{int(middle // 60):02d}:{int(middle % 60):02d} ", ""
        case "number":
            return f"Frame{index + 1}: ", ""
        case "second_after":
            return "", str(int(seconds[0]))
        case "seconds_after":
            return "", f"{seconds[0]:.1f} seconds"
    return f"<{middle:.1f} seconds>", ""


def _frame_size(height: int, width: int, count: int, config: VideoProcessorConfig, max_patches: int) -> tuple[int, int]:
    """Return height and width of each frame in pixels."""
    sizes, factor = config.sizes, config.patch_size * config.merge
    own = max_patches * config.patch_size**2
    match sizes:
        case BudgetSizes(budget):
            return budget_size(height, width, config.patch_size, config.merge, min(budget, max_patches))
        case FrameArea(least, most, total):
            share = most if total is None else max(min(most, total // count), int(least * 1.05))
            return bounded_size(height, width, factor, AreaSizes(least, share, bound=own))
        case SquareFrames(side):
            return side, side
        case VideoArea():
            return _joint_size(height, width, count, sizes, config, own)


def _joint_size(
    height: int, width: int, count: int, sizes: VideoArea, config: VideoProcessorConfig, own: int
) -> tuple[int, int]:
    """Return height and width of each of `count` frames whose areas have a joint bound. own: pixels that the engine can encode."""
    factor, most = config.patch_size * config.merge, sizes.max_pixels
    if sizes.most_frame_tokens is not None:
        share = min(sizes.most_frame_tokens * factor**2, sizes.max_pixels // count)
        most = max(share, int(sizes.min_pixels * 1.05)) * count
    compared = max(round(count / config.group), 1) * config.group
    area = AreaSizes(sizes.min_pixels, most, count, enlargement="both", compared_frames=compared, bound=own)
    return bounded_size(height, width, factor, area)


def _item(frames: list[np.ndarray], time: int | None, config: VideoProcessorConfig) -> EncoderItem:
    """Return a group of frames: of a patch channels, then frames, then rows, then columns."""
    cut = [cut_patches(frame, config.patch_size, config.merge) for frame in frames]
    channels = frames[0].shape[-1]
    patches = np.stack([patches.reshape(len(patches), channels, -1) for patches, _ in cut], axis=2)
    grid = tuple(side // config.patch_size for side in frames[0].shape[:2])
    flat, block = patches.reshape(len(patches), -1), config.merge**2
    flat, positions = as_read(flat, cut[0][1], block, window=config.window, has_class_token=config.has_class_token)
    return EncoderItem(flat, positions, (grid[0], grid[1]), len(patches) // block, time=time)
