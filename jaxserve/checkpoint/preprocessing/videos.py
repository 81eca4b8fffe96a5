"""Reads how a checkpoint's videos are preprocessed: `video_preprocessor_config.json`, or the table in `processor_config.json`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.image_processor import read_normalization, read_resampling
from jaxserve.checkpoint.preprocessing.table import MAX_SIDE, Table, token_text
from jaxserve.model_config.images import BudgetSizes, FrameSampling, VideoArea, VideoMarkup, VideoProcessorConfig

_OWN, _JOINT = "video_preprocessor_config.json", "processor_config.json"
_MAX_FRAMES: Final = 1 << 16
_MAX_AREA: Final = 1 << 36
_SIZE: Final = {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}
"""Pixels of all frames, the fewest and the most, if a checkpoint of Qwen3-VL does not say (transformers' defaults)."""


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
    if not isinstance(values, dict) or not config.is_file():
        return None
    model = Table(config, read_object(config))
    reader = _READERS.get((values.get("video_processor_type"), model.get("model_type", None)))
    if reader is None:
        return None
    tokens = directory / "tokenizer_config.json"
    table = Table(path, {key: value for key, value in values.items() if value is not None})
    for key in ("do_resize", "do_sample_frames"):
        if not table.flag(key, default=True):
            raise table.error(key, "true")
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


def _sampling(table: Table, fps: float | None, *, has_last: bool) -> FrameSampling:
    """Read which frames are taken. fps: the default; None: a number of frames is taken, 32 by default."""
    is_counted = "num_frames" in table.values
    if is_counted and "fps" in table.values:
        raise table.error("num_frames", "nothing beside fps")
    is_counted |= fps is None and "fps" not in table.values
    return FrameSampling(
        num_frames=table.integer("num_frames", 32, _MAX_FRAMES) if is_counted else None,
        fps=table.number("fps", fps or 1.0),
        min_frames=table.integer("min_frames", 4 if has_last else 1, _MAX_FRAMES),
        max_frames=table.integer("max_frames", 768 if has_last else _MAX_FRAMES, _MAX_FRAMES),
        has_last=has_last,
    )


_READERS: Final[Mapping[tuple[Any, Any], Callable[[Table, Table, Mapping[str, Any]], VideoProcessorConfig]]] = {
    ("Qwen3VLVideoProcessor", "qwen3_vl"): _areas,
    ("Qwen3VLVideoProcessor", "qwen3_vl_moe"): _areas,
    ("Qwen3VLVideoProcessor", "qwen3_5"): _areas,
    ("Qwen3VLVideoProcessor", "qwen3_5_moe"): _areas,
    ("Gemma4VideoProcessor", "gemma4"): _budgets,
}
"""By `video_processor_type` and `model_type`: prompts of models that share a processor may differ."""
