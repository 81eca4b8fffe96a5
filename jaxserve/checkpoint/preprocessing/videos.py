"""Reads how a checkpoint's videos are preprocessed: `video_preprocessor_config.json`, or the table in `processor_config.json`.

Qwen2-VL and Qwen2.5-VL as published have neither: videos have the patches and the normalisation of images, and the sizes and the number of
frames with which the models were trained.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.image_processor import read_normalization, read_resampling
from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Table, token_text
from jaxserve.checkpoint.preprocessing.tiles import grid
from jaxserve.checkpoint.preprocessing.whole import CLIP_DEVIATIONS, CLIP_MEANS, window_side
from jaxserve.model_config.preprocessing.images import BudgetSizes
from jaxserve.model_config.preprocessing.videos import (
    DynamicSampling,
    FrameArea,
    FrameSampling,
    SquareFrames,
    TimedSampling,
    TimePositions,
    VideoArea,
    VideoMarkup,
    VideoProcessorConfig,
)

_OWN, _JOINT, _IMAGES = "video_preprocessor_config.json", "processor_config.json", "preprocessor_config.json"
_MAX_FRAMES: Final = 1 << 16
_MAX_AREA: Final = 1 << 36
_SIZE: Final = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
"""Pixels of all frames, the fewest and the most, if a checkpoint of Qwen3-VL does not say (transformers' defaults)."""
_FRAME_SIZE: Final = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
"""Pixels of a frame, the fewest and the most, if a checkpoint of Qwen2-VL does not say (transformers' defaults, and the authors')."""
_GLM_SIZE: Final = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000}
"""Pixels of all frames, the fewest and the most, if a checkpoint of GLM-4.1V does not say (transformers' defaults)."""
_GLM_RATES: Final = DynamicSampling(((30, 3.0), (300, 1.0), (2400, 0.5)), 2, 640)
"""Frames of GLM-4.6V, which no file says."""
_GLM_PLAIN, _GLM_DYNAMIC = "Glm4vVideoProcessor", "Glm46VVideoProcessor"
_INTERNVL_FRAMES: Final = 8
"""Frames that InternVL takes unless a file says how many (the authors' examples)."""
_USED_SHARE: Final = 0.9
"""Share of `max_video_tokens` that videos of Qwen2-VL fill."""
_PLAIN: Final = "Qwen2VLVideoProcessor"
_PUBLISHED_PLAIN: Final = ("qwen2_vl", "qwen2_5_vl")
"""Types of models that were published without a description of videos, and are prepared by this processor."""


def has_decoder() -> bool:
    """Return True if videos can be decoded here: PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def read_video_processor(directory: Path) -> VideoProcessorConfig | None:
    """Read the preprocessing of videos of the checkpoint in `directory`; None if it describes none, or one of a kind that is not served.

    Raises CheckpointError naming file and key for a value that is not supported.
    """
    own, path, config = directory / _OWN, directory / _JOINT, directory / "config.json"
    joint = read_object(path) if path.is_file() else {}
    values: Any = joint.get("video_processor")
    model = Table(config, read_object(config) if config.is_file() else {})
    if values is None and own.is_file():
        values, path = read_object(own), own
    elif values is None and model.get("model_type", None) in _PUBLISHED_PLAIN and (directory / _IMAGES).is_file():
        values, path = _as_images(read_object(directory / _IMAGES)), directory / _IMAGES
    if not isinstance(values, dict):
        return None
    reader = _READERS.get((values.get("video_processor_type"), model.get("model_type", None)))
    if reader is None:
        return None
    tokens = directory / "tokenizer_config.json"
    table = Table(path, {key: value for key, value in values.items() if value is not None})
    leaves_sampling = reader in (_frames, _squares)  # to the caller, unless a file says how
    for key in ("do_resize",) if leaves_sampling else ("do_resize", "do_sample_frames"):
        if not table.flag(key, default=True):
            raise table.error(key, "true")
    if table.flag("do_center_crop", default=False):
        raise table.error("do_center_crop", "false")
    return reader(table, model, read_object(tokens) if tokens.is_file() else {})


def _areas(table: Table, model: Table, tokens: Mapping[str, Any]) -> VideoProcessorConfig:
    """Read the preprocessing of Qwen3-VL and Qwen3.5 (arXiv 2511.21631)."""
    size = table.table("size", dict(_SIZE))
    begin, end = "<|vision_start|>", "<|vision_end|>"
    token = token_text(tokens, "video_token", "<|video_pad|>")
    is_capped = table.flag("cap_pixels_per_frame", default=False)
    return VideoProcessorConfig(
        sampling=_sampling(table, 2.0, has_last=True),
        sizes=VideoArea(
            size.integer("shortest_edge", None, _MAX_AREA),
            size.integer("longest_edge", None, _MAX_AREA),
            table.integer("max_video_tokens", 768, _MAX_FRAMES) if is_capped else None,
        ),
        patch_size=table.integer("patch_size", 16, MAX_SIDE),
        merge=table.integer("merge_size", 2, 64),
        group=table.integer("temporal_patch_size", 2, 16),
        markup=VideoMarkup(begin + token + end, begin, token, end, "", "seconds"),
        resampling=read_resampling(table, "bicubic"),
        normalization=read_normalization(table, (0.5,) * 3, (0.5,) * 3),
        token_id=model.integer("video_token_id", None, 1 << 22),
    )


def _as_images(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a description of images says of videos, too."""
    sizes = ("size", "min_pixels", "max_pixels")
    return {key: value for key, value in values.items() if key not in sizes} | {"video_processor_type": _PLAIN}


def _frames(table: Table, model: Table, tokens: Mapping[str, Any]) -> VideoProcessorConfig:
    """Read the preprocessing of Qwen2-VL and Qwen2.5-VL (arXiv 2409.12191, 2502.13923)."""
    size = table.table("size", dict(_FRAME_SIZE))
    begin, end = "<|vision_start|>", "<|vision_end|>"
    token = token_text(tokens, "video_token", "<|video_pad|>")
    patch, merge = table.integer("patch_size", 14, MAX_SIDE), table.integer("merge_size", 2, 64)
    group, most = table.integer("temporal_patch_size", 2, 16), table.integer("max_video_tokens", 128_000, 1 << 24)
    has_total = table.flag("cap_pixels_per_frame", default=True)
    vision = model.table("vision_config", {})
    is_timed = model.get("model_type", None) == "qwen2_5_vl"
    return VideoProcessorConfig(
        sampling=_sampling(table, 2.0, has_last=False, multiple=group),
        sizes=FrameArea(
            table.integer("min_pixels", size.integer("shortest_edge", None, _MAX_AREA), _MAX_AREA),
            table.integer("max_pixels", size.integer("longest_edge", None, _MAX_AREA), _MAX_AREA),
            int(most * (patch * merge) ** 2 * _USED_SHARE) * group if has_total else None,
        ),
        patch_size=patch,
        merge=merge,
        group=group,
        markup=VideoMarkup(begin + token + end, begin, token, end, "", "none"),
        resampling=read_resampling(table, "bicubic"),
        normalization=read_normalization(table, CLIP_MEANS, CLIP_DEVIATIONS),
        token_id=model.integer("video_token_id", 151_656, 1 << 22),
        window=window_side(model, patch, merge),
        times=TimePositions(vision.number("tokens_per_second", 4.0) if is_timed else None),
    )


def _glm(table: Table, model: Table, tokens: Mapping[str, Any]) -> VideoProcessorConfig:
    """Read the preprocessing of GLM-4.1V to GLM-4.6V (arXiv 2507.01006). Frames have the token of images."""
    size, is_dynamic = table.table("size", dict(_GLM_SIZE)), table.get("video_processor_type", None) == _GLM_DYNAMIC
    token = token_text(tokens, "image_token", "<|image|>")
    group = table.integer("temporal_patch_size", 2, 16)
    timed = TimedSampling(table.number("fps", 2.0), table.integer("max_duration", 300, 1 << 20))
    return VideoProcessorConfig(
        sampling=replace(_GLM_RATES, group=group) if is_dynamic else timed,
        sizes=VideoArea(
            size.integer("shortest_edge", None, _MAX_AREA), size.integer("longest_edge", None, _MAX_AREA), None
        ),
        patch_size=table.integer("patch_size", 14, MAX_SIDE),
        merge=table.integer("merge_size", 2, 64),
        group=group,
        markup=VideoMarkup(
            token_text(tokens, "video_token", "<|video|>"),
            "<|begin_of_image|>",
            token,
            "<|end_of_image|>",
            "",
            "seconds_after" if is_dynamic else "second_after",
        ),
        resampling=read_resampling(table, "bicubic"),
        normalization=read_normalization(table, CLIP_MEANS, CLIP_DEVIATIONS),
        token_id=model.integer("image_token_id", None, 1 << 22),
    )


def _squares(table: Table, model: Table, tokens: Mapping[str, Any]) -> VideoProcessorConfig:
    """Read the preprocessing of InternVL (arXiv 2504.10479), whose frames are tiles of images."""
    if not table.flag("initial_shift", default=True):
        raise table.error("initial_shift", "true")
    tile = grid(table, model, tokens)
    markup, video = tile.markup, token_text(tokens, "video_token", "<video>")
    return VideoProcessorConfig(
        sampling=_sampling(table, None, has_last=False, number=_INTERNVL_FRAMES, is_centered=True),
        sizes=SquareFrames(table.table("size", {"height": 384}).integer("height", None, MAX_SIDE)),
        patch_size=tile.patch_size,
        merge=tile.merge,
        group=1,
        markup=VideoMarkup(video, markup.begin, markup.token, markup.end, "\n", "number"),
        resampling=read_resampling(table, "bicubic"),
        normalization=read_normalization(table, CLIP_MEANS, CLIP_DEVIATIONS),
        token_id=model.integer("image_token_id", None, 1 << 22),
        has_class_token=tile.has_class_token,
    )


def _budgets(table: Table, model: Table, tokens: Mapping[str, Any]) -> VideoProcessorConfig:
    """Read the preprocessing of Gemma 4, whose frames are images of a smaller budget."""
    merge = table.integer("pooling_kernel_size", 3, 64)
    token = token_text(tokens, "video_token", "<|video|>")
    begin, end = token_text(tokens, "boi_token", "<|image>"), token_text(tokens, "eoi_token", "<image|>")
    return VideoProcessorConfig(
        sampling=_sampling(table, None, has_last=False),
        sizes=BudgetSizes(table.integer("max_soft_tokens", 70, 1 << 14) * merge**2),
        patch_size=table.integer("patch_size", 16, MAX_SIDE),
        merge=merge,
        group=1,
        markup=VideoMarkup(token, begin, token, end, " ", "clock"),
        resampling=read_resampling(table, "bicubic"),
        normalization=read_normalization(table, (0.0,) * 3, (1.0,) * 3),
        token_id=model.integer("video_token_id", None, 1 << 22),
    )


def _sampling(
    table: Table,
    fps: float | None,
    *,
    has_last: bool,
    multiple: int = 1,
    number: int = 32,
    is_centered: bool = False,
) -> FrameSampling:
    """Read which frames are taken. fps: the default; None: by default `number` frames are taken."""
    has_least = has_last or multiple > 1  # of Qwen's models
    is_counted = "num_frames" in table.values
    if is_counted and "fps" in table.values:
        raise table.error("num_frames", "nothing beside fps")
    is_counted |= fps is None and "fps" not in table.values
    counted = table.integer("num_frames", number, _MAX_FRAMES)
    return FrameSampling(
        num_frames=max(round(counted / multiple), 1) * multiple if is_counted else None,
        fps=table.number("fps", fps or 1.0),
        min_frames=table.integer("min_frames", 4 if has_least else 1, _MAX_FRAMES),
        max_frames=table.integer("max_frames", 768 if has_least else _MAX_FRAMES, _MAX_FRAMES),
        has_last=has_last,
        multiple=multiple,
        is_centered=is_centered,
    )


_READERS: Final[Mapping[tuple[Any, Any], Callable[[Table, Table, Mapping[str, Any]], VideoProcessorConfig]]] = {
    ("Qwen3VLVideoProcessor", "qwen3_vl"): _areas,
    ("Qwen3VLVideoProcessor", "qwen3_vl_moe"): _areas,
    ("Qwen3VLVideoProcessor", "qwen3_5"): _areas,
    ("Qwen3VLVideoProcessor", "qwen3_5_moe"): _areas,
    **{(kind, model): _glm for kind in (_GLM_PLAIN, _GLM_DYNAMIC) for model in ("glm4v", "glm4v_moe", "glm46v")},
    (_PLAIN, "qwen2_vl"): _frames,
    (_PLAIN, "qwen2_5_vl"): _frames,
    ("InternVLVideoProcessor", "internvl"): _squares,
    ("Gemma4VideoProcessor", "gemma4"): _budgets,
}
"""By `video_processor_type` and `model_type`: prompts of models that share a processor may differ."""
