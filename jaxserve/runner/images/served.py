"""Decides if a model's images are served: unless the user asks for them, a model whose images cannot be is served for texts."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.checkpoint.preprocessing.videos import has_decoder, read_video_processor
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.vision_names import VISION
from jaxserve.config import ImagesConfig
from jaxserve.errors import CheckpointError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.preprocessing.videos import VideoProcessorConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.registry import text_model, with_vision

_LOG = logging.getLogger(__name__)


def with_served_images(
    settings: ImagesConfig,
    decoder: DecoderConfig,
    path: Path,
    checkpoint: Checkpoint | None,
    mmproj: Path | None = None,
) -> DecoderConfig:
    """Return `decoder` with its tower if images are to be served.

    checkpoint: None for a directory with only config.json. mmproj: the GGUF file with the image encoder of a GGUF text model. A tower
    that cannot be served is left out with a warning; raises CheckpointError instead if a setting asks for images.
    """
    if not settings.max_images:
        return _of_texts(decoder, path)
    try:
        found = with_vision(decoder, path, text_model(path, checkpoint), mmproj)
        if found.vision is None and settings.asks_for_images:
            raise CheckpointError(f"{path}: the model reads no images")
        if found.vision is not None and checkpoint is not None:
            _check_tensors(checkpoint)
        if found.vision is not None and settings.max_videos:
            found = replace(found, vision=_with_videos(settings, found.vision, path, mmproj))
    except CheckpointError as error:
        if settings.limit_mm_per_prompt is not None:
            limit = f"--limit-mm-per-prompt {settings.limit_mm_per_prompt}"
            raise CheckpointError(f"{limit}: {error}; use image=0 to serve text only") from error
        if settings.asks_for_images:
            raise CheckpointError(f"--mmproj {settings.mmproj}: {error}") from error
        _LOG.warning("images are not served, texts are: %s", error)
        return _of_texts(decoder, path)
    return found if found.vision is not None else _of_texts(found, path)


def _with_videos(settings: ImagesConfig, vision: VisionConfig, path: Path, mmproj: Path | None) -> VisionConfig:
    """Return the tower as it is with videos; unchanged if they are not served.

    Raises CheckpointError if a setting asks for videos that cannot be served.
    """
    try:
        processor = None if mmproj is not None else read_video_processor(path)
        if processor is not None:
            _check_videos(processor, vision, path)
            return replace(vision, has_videos=True)
        if settings.asks_for_videos:
            raise CheckpointError(f"{path}: the model reads no videos, or not in a way that is served (docs/images.md)")
    except CheckpointError as error:
        if settings.asks_for_videos:
            raise CheckpointError(f"{error}; use video=0 to serve images only") from error
        _LOG.warning("videos are not served, images are: %s", error)
    return vision


def _check_videos(processor: VideoProcessorConfig, vision: VisionConfig, path: Path) -> None:
    """Raise CheckpointError if frames cannot be decoded here, or are not prepared as images are."""
    if not has_decoder():
        raise CheckpointError(f"{path}: videos are decoded by PyAV: pip install 'jaxserve[video]'")
    images, group = read_image_processor(path), vision.num_frames or 1
    if group > 1 and (vision.patches, vision.num_channels) != ("convolution", 3):
        raise CheckpointError(f"{path}: patches of videos have a layout that is not supported")
    found = (processor.group, processor.patch_size, processor.merge, processor.normalization)
    if images is None or found != (group, vision.patch_size, vision.merge, images.normalization):
        raise CheckpointError(f"{path}: frames of videos are prepared in another way than images")


def _of_texts(decoder: DecoderConfig, path: Path) -> DecoderConfig:
    """Return a decoder without its tower. Raises CheckpointError for one whose prompts are seen whole, as steps with images alone do."""
    if decoder.has_whole_prompts:
        raise CheckpointError(
            f"{path}: prompts of this model are seen whole, which is served with its image encoder only"
        )
    return decoder


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the checkpoint has a tower in a float type."""
    towers = [info for name, info in checkpoint.tensors.items() if name.startswith(VISION)]
    if not towers:
        raise CheckpointError(f"{checkpoint.path}: it has no tensors of the image encoder")
    for info in towers:
        if info.is_quantized or info.stored_dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(f"{info.file}: tensor {info.name!r} of the image encoder is quantised")
