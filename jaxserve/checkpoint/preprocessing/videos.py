"""Reads how a checkpoint's videos are preprocessed: `video_preprocessor_config.json`, or the table in `processor_config.json`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.image_processor import read_normalization, read_resampling
from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Table, token_text
from jaxserve.model_config.images import VideoMarkup, VideoProcessorConfig

_OWN, _JOINT = "video_preprocessor_config.json", "processor_config.json"
_TYPE: Final = "Qwen3VLVideoProcessor"
_MODELS: Final = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Values of `model_type` of the models whose prompts have a time before each group of frames."""
_MAX_FRAMES: Final = 1 << 16
_MAX_AREA: Final = 1 << 36
_SIZE: Final = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
"""Pixels of all frames, the fewest and the most, if a checkpoint does not say (transformers' defaults)."""


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
    if values is None and own.is_file():
        values, path = read_object(own), own
    if not isinstance(values, dict) or values.get("video_processor_type") != _TYPE or not config.is_file():
        return None
    model = Table(config, read_object(config))
    if model.get("model_type", None) not in _MODELS:
        return None
    tokens = directory / "tokenizer_config.json"
    table = Table(path, {key: value for key, value in values.items() if value is not None})
    return _read(table, model, read_object(tokens) if tokens.is_file() else {})


def _read(table: Table, model: Table, tokens: Mapping[str, Any]) -> VideoProcessorConfig:
    for key in ("do_resize", "do_sample_frames"):
        if not table.flag(key, default=True):
            raise table.error(key, "true")
    is_counted = "num_frames" in table.values
    if is_counted and "fps" in table.values:
        raise table.error("num_frames", "nothing beside fps")
    size = table.table("size", dict(_SIZE))
    begin, end = "<|vision_start|>", "<|vision_end|>"
    token = token_text(tokens, "video_token", "<|video_pad|>")
    is_capped = table.flag("cap_pixels_per_frame", default=False)
    return VideoProcessorConfig(
        num_frames=table.integer("num_frames", None, _MAX_FRAMES) if is_counted else None,
        fps=table.number("fps", 2.0),
        min_frames=table.integer("min_frames", 4, _MAX_FRAMES),
        max_frames=table.integer("max_frames", 768, _MAX_FRAMES),
        min_pixels=size.integer("shortest_edge", None, _MAX_AREA),
        max_pixels=size.integer("longest_edge", None, _MAX_AREA),
        most_frame_tokens=table.integer("max_video_tokens", 768, _MAX_FRAMES) if is_capped else None,
        patch_size=table.integer("patch_size", 16, MAX_SIDE),
        merge=table.integer("merge_size", 2, 64),
        group=table.integer("temporal_patch_size", 2, 16),
        markup=VideoMarkup(begin + token + end, begin, token, end),
        resampling=read_resampling(table, "bicubic"),
        normalization=read_normalization(table, (0.5,) * 3, (0.5,) * 3),
        token_id=model.integer("video_token_id", None, 1 << 22),
    )
