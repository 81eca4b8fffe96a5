"""Places of images in the tokens of a prompt, and the three positions of each token where a model has them (M-RoPE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.ipc.prompt_images import MAX_ROPE_POSITION


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens of a prompt that stand for an encoder item, and line breaks between them."""

    start: int
    length: int


def image_spans(
    token_ids: np.ndarray,
    image_token_id: int,
    counts: Sequence[int],
    lines: Sequence[int] | None = None,
    mark_token_ids: tuple[int, ...] = (),
) -> list[ImageSpan]:
    """Return the span of each item, whose numbers of image tokens are `counts`, in their order.

    lines: image tokens of each item between two line breaks, 0: an item has no line breaks; None: none has.
    mark_token_ids: tokens that count as image tokens, too. Raises ValueError if the prompt does not have exactly these image tokens, each item's side by side but for line breaks.
    """
    places = np.flatnonzero(np.isin(token_ids, (image_token_id, *mark_token_ids)))
    if len(places) != sum(counts):
        raise ValueError(f"the prompt has {len(places)} image tokens, the images make {sum(counts)}")
    spans, first = [], 0
    for count, line in zip(counts, lines or [0] * len(counts), strict=True):
        own, numbers = places[first : first + count], np.arange(count)
        if (own - own[0] != numbers + (numbers // line if line else 0)).any():
            raise ValueError(f"the {count} tokens of an image are not side by side")
        spans.append(ImageSpan(int(own[0]), int(own[-1] - own[0]) + 1))
        first += count
    return spans


def mrope_positions(
    num_tokens: int,
    spans: Sequence[ImageSpan],
    grids: Sequence[tuple[int, int]],
    merge: int,
    times: Sequence[int | None] | None = None,
) -> tuple[np.ndarray, int]:
    """Return int32 (3, T), the position of each token in time, rows and columns, and what generated tokens add to theirs.

    A text's tokens advance all three by one. An image's tokens stay at one time; their rows and columns count from there,
    and the text goes on after the longer side (Qwen2-VL, arXiv 2409.12191). Token number t >= T, counted from the start of
    the prompt, has the position t + delta three times.
    grids: patches in a column and in a row of each item; merge: patches of the side of the block that makes one token.
    times: positions in time between the first group of frames of a video and each item, which then follows its last group and shares its
    place: the text goes on after the last of all positions; None: an item with a place of its own, and for all of them: every item has one.
    Raises ValueError if the times of videos make positions that are too large.
    """
    positions = np.zeros((3, num_tokens), np.int32)
    next_token, next_position, place = 0, 0, 0
    for span, (height, width), time in zip(spans, grids, times or [None] * len(spans), strict=True):
        if time is None:
            text = span.start - next_token
            positions[:, next_token : span.start] = next_position + np.arange(text)
            place = next_position = next_position + text
        rows, columns = np.indices((height // merge, width // merge)).reshape(2, -1)
        positions[:, span.start : span.start + span.length] = place + np.stack([0 * rows + (time or 0), rows, columns])
        next_token = span.start + span.length
        next_position = max(next_position, place + max(max(height, width) // merge, (time or 0) + 1))
    if next_position + num_tokens > MAX_ROPE_POSITION:
        raise ValueError(f"the videos are too long: the text after them would have position {next_position}")
    positions[:, next_token:] = next_position + np.arange(num_tokens - next_token)
    return positions, int(next_position - next_token)
