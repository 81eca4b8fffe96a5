"""Images that are encoded together, in one call of the encoder or in parts of it, and what else is filled before a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from jaxserve.ipc.image_info import ImageInfo
from jaxserve.scheduler.images.request_images import PlacedEmbeds, PlacedImage, RequestImages
from jaxserve.scheduler.plan import EmbedsItem, EncodeItem
from jaxserve.types import RequestId


@dataclass(slots=True, eq=False)
class StepItems:
    """The rows to fill before a step, as far as they were found to be missing."""

    max_patches: int
    """Patches of all images, unless there is only one; 0: encode none."""
    awaited: Collection[bytes]
    """Digests of images whose call is not done before the step."""
    num_tokens: int | None = None
    """Tokens that chunks with images may still have; None: chunks have any number."""
    images: dict[bytes, EncodeItem] = field(default_factory=dict)
    """By digest."""
    embeds: list[EmbedsItem] = field(default_factory=list)

    def may_encode(self, image: PlacedImage) -> bool:
        """Return True if an image may join those that are encoded: the first one always may."""
        encoded = sum(len(item.patches) for item in self.images.values())
        return len(image.patches) + encoded <= self.max_patches or bool(self.max_patches and not self.images)

    def cut(self, images: RequestImages, first: int, end: int) -> int:
        """Return where the chunk of tokens `first` ... `end - 1`, whose images have rows, ends so that those with images are few."""
        places = [] if self.num_tokens is None or images.is_given else images.overlapping(first, end)
        if self.num_tokens is None or not places or images.is_bidirectional:
            return end
        start = images.images[places[0]].start
        end = min(end, max(start, first + self.num_tokens))
        if end > start:
            self.num_tokens = max(0, self.num_tokens - (end - first))
        return end

    def add(self, image: PlacedImage | PlacedEmbeds, rows: np.ndarray, request_id: RequestId) -> None:
        """Fill the rows of an image, or of given embeddings, that a request needs first."""
        if isinstance(image, PlacedImage):
            self.images[image.digest] = image.item(rows, request_id)
        else:
            self.embeds.append(image.item(rows, request_id))


@dataclass(slots=True, eq=False)
class EncoderCall:
    """Images that are encoded together, in parts that follow each other, perhaps with steps between them."""

    items: dict[bytes, EncodeItem]
    """By digest."""
    ends: tuple[int, ...]
    """Ends of the parts, in calls of the encoder's programs."""
    num_done: int = 0
    """Parts that were planned."""

    @property
    def is_done(self) -> bool:
        return self.num_done == len(self.ends)

    def advance(self, num_parts: int | None) -> list[EncodeItem]:
        """Return the images with the calls of the next parts. num_parts: None: of all parts that are left."""
        start, end = self.num_done, len(self.ends)
        self.num_done = end if num_parts is None else min(start + num_parts, end)
        if not start and self.is_done:
            return [*self.items.values()]
        units = (self.ends[start - 1] if start else 0, self.ends[self.num_done - 1])
        return [replace(item, units=units) for item in self.items.values()]


def part_ends(info: ImageInfo, items: Iterable[EncodeItem]) -> tuple[int, ...]:
    """Return where each part ends in which the encoder's smallest program that holds these images runs beside replies."""
    count = sum(len(item.patches) for item in items)
    return next((ends for size, ends in info.encoder_parts if size >= count), (1,))
