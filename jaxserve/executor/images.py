"""Describes image input and embeddings of prompts to the scheduler and the API process."""

from __future__ import annotations

import math
from typing import Final

from jaxserve.config import ImagesConfig
from jaxserve.executor.preparation import Preparation
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.prompt_embeds import PromptEmbedsInfo
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.images.encoder import image_step_tokens

STEP_PATCHES: Final = {"cpu": 1024}
"""Patches that are encoded before a step while replies are generated, by platform."""
ACCELERATOR_STEP_PATCHES: Final = 4096


def image_info(prepared: Preparation, settings: ImagesConfig) -> ImageInfo | None:
    """Return the sizes of image input; None for a model that is served for texts."""
    shape = prepared.images
    if shape is None or not shape.buckets:
        return None
    wanted = settings.max_encode_patches
    if wanted is None:
        wanted = STEP_PATCHES.get(prepared.device.platform, ACCELERATOR_STEP_PATCHES)
    return ImageInfo(
        max_patches=shape.max_patches,
        max_tokens=shape.rows_of(shape.max_patches),
        cache_rows=shape.num_rows,
        merge=math.isqrt(shape.block),
        patch_bytes=shape.patch_bytes // shape.num_frames,
        num_frames=shape.num_frames,
        reads_videos=shape.has_videos,
        has_rope_positions=shape.has_rope_positions,
        step_patches=min(wanted, shape.max_patches),
        is_bidirectional=shape.is_bidirectional,
        step_tokens=image_step_tokens(prepared.device.platform, settings),
        encoder_parts=prepared.encoder_parts,
        has_class_token=shape.class_length is not None,
        whole_prompt_tokens=_whole_prompt_tokens(prepared),
        num_sources=shape.num_sources,
        tile_patches=shape.tile_patches,
    )


def _whole_prompt_tokens(prepared: Preparation) -> int:
    """Return the most tokens of a prompt that is seen whole: those of a step beside a token of every other request, within any window."""
    decoder = prepared.skeleton.config
    if not isinstance(decoder, DecoderConfig) or not decoder.has_whole_prompts:
        return 0
    windows = [layer.sliding_window for layer in decoder.layers if layer.sliding_window is not None]
    buckets = prepared.limits.buckets
    return min([max(buckets.mixed) - buckets.max_num_seqs + 1, *windows])


def prompt_embeds_info(prepared: Preparation) -> PromptEmbedsInfo | None:
    """Return the sizes of embeddings that clients may give in place of tokens; None if they may not.

    A piece is a page, so that a changed embedding changes the names of its own page and of later ones only.
    """
    shape = prepared.images
    if shape is None or not shape.num_given:
        return None
    piece = min(prepared.limits.spec.block_size, shape.num_rows)
    return PromptEmbedsInfo(shape.given_width, piece, shape.num_rows)
