"""The places of a request's images in its prompt, as they cross to the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.errors import invalid
from jaxserve.frontend.images.loader import LoadedImages
from jaxserve.frontend.images.positions import image_spans, mrope_positions
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.prompt_images import PromptImage, RopePositions


def prompt_images(
    token_ids: Sequence[int], images: LoadedImages, info: ImageInfo, param: str
) -> tuple[list[PromptImage], RopePositions | None]:
    """Return the images of a prompt with their places, and rotary positions if the model has three for each token.

    Raises InvalidRequestError naming `param` if the prompt does not show every image, or videos are too long.
    """
    items, prompt = images.items, np.array(token_ids, np.int32)
    try:
        counts, lines = [item.num_tokens for item in items], [item.line for item in items]
        spans = image_spans(prompt, images.image_token_id, counts, lines, images.mark_token_ids)
    except ValueError as error:
        raise invalid(param, f"the chat template does not show its images as the model reads them: {error}") from None
    placed = [
        PromptImage(span.start, item.num_tokens, item.digest, item.patches, item.positions, item.line, item.sources)
        for span, item in zip(spans, items, strict=True)
    ]
    if not info.has_rope_positions:
        return placed, None
    grids, times = [item.grid for item in items], [item.time for item in items]
    try:
        positions, delta = mrope_positions(len(prompt), spans, grids, info.merge, times)
    except ValueError as error:
        raise invalid(param, str(error)) from None
    return placed, RopePositions(np.ascontiguousarray(positions, "<i4").tobytes(), delta)
