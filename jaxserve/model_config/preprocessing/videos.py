"""Preprocessing of videos as data: frames, sizes, times, and the text that stands for a video in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.model_config.preprocessing.images import BudgetSizes, Resampling
from jaxserve.model_config.vision import Normalization


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """The frames of a video that a model sees, at even distances."""

    num_frames: int | None
    """Frames that are taken of any video; None: as many as `fps` says."""
    fps: float
    """Frames that are taken of each second."""
    min_frames: int
    max_frames: int
    has_last: bool
    """True if the last frame of a video is among them."""
    multiple: int = 1
    """The number of frames is a multiple of this one, unless the video has fewer."""
    is_centered: bool = False
    """True if frames are those in the middle of equal parts of the video, False if those at the beginning."""


@dataclass(frozen=True, slots=True)
class TimedSampling:
    """The frames that are shown a number of times in each second; of a longer video as many, at even distances (GLM-4.1V)."""

    fps: float
    max_seconds: int
    """Seconds of the longest video of which each second is shown."""


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """The longer a video is, the fewer frames of each second are taken (GLM-4.6V)."""

    rates: tuple[tuple[float, float], ...]
    """Seconds of a video, the fewest first, and the groups of frames that are taken of each second of videos up to this length."""
    group: int
    """Frames of a group."""
    max_frames: int


@dataclass(frozen=True, slots=True)
class VideoArea:
    """Both sides of frames are rounded to whole blocks, and the area of all frames is kept between two bounds (Qwen3-VL, GLM-4.1V)."""

    min_pixels: int
    """Least pixels of all frames together."""
    max_pixels: int
    """Most pixels of all frames together."""
    most_frame_tokens: int | None
    """Tokens that a frame has at most, unless the least pixels are more; None: all frames together have a bound alone."""


@dataclass(frozen=True, slots=True)
class FrameArea:
    """Both sides of frames are rounded to whole blocks, and the area of each frame is kept between two bounds (Qwen2-VL)."""

    min_pixels: int
    max_pixels: int
    total_pixels: int | None
    """Most pixels of all groups of frames together, unless the least pixels of a frame are more; None: they have no bound."""


@dataclass(frozen=True, slots=True)
class SquareFrames:
    """Frames become squares of one size, whatever their proportions (InternVL)."""

    side: int
    """Pixels."""


@dataclass(frozen=True, slots=True)
class VideoMarkup:
    """Texts of a prompt that stand for videos. They are control tokens of the tokenizer, but for times."""

    placeholder: str
    """Text that chat templates write for a video."""
    begin: str
    """Text before the tokens of a group of frames, after a time that precedes them, or before those of the video."""
    token: str
    """Text of the token that stands for one embedding."""
    end: str
    """Text after the tokens of a group of frames, or of the video."""
    separator: str
    """Text between two groups of frames."""
    time: Literal["seconds", "clock", "number", "none", "second_after", "seconds_after"]
    """Before a group: seconds: `<1.5 seconds>`; clock: `00:01 `; number: `Frame1: `. After it: second_after: `1`; seconds_after: `1.5 seconds`.
    none: groups have neither a time nor marks of their own, see `TimePositions`."""


@dataclass(frozen=True, slots=True)
class TimePositions:
    """Groups of frames of a video share one place in the prompt's rotary positions and differ in the time (M-RoPE, arXiv 2409.12191)."""

    per_second: float | None
    """Positions of a second (Qwen2.5-VL, arXiv 2502.13923), rounded down for each group; None: each group is one after the group before."""


@dataclass(frozen=True, slots=True)
class VideoProcessorConfig:
    """Preprocessing of videos that become groups of a few frames."""

    sampling: FrameSampling | TimedSampling | DynamicSampling
    sizes: VideoArea | FrameArea | SquareFrames | BudgetSizes
    patch_size: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of a block, which becomes one token."""
    group: int
    """Frames that one patch shows."""
    markup: VideoMarkup
    resampling: Resampling
    normalization: Normalization
    token_id: int
    """Token that stands for one embedding in a prompt."""
    window: int | None = None
    """See `ImageProcessorConfig.window`."""
    has_class_token: bool = False
    """See `ImageProcessorConfig.has_class_token`."""
    times: TimePositions | None = None
    """Rotary positions of groups; None: each group has a place of its own, as an image has."""
