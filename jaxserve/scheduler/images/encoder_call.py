"""Images that are encoded together, in one call of the encoder or in parts of it, and what else is filled before a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from jaxserve.ipc.image_info import ImageInfo
from jaxserve.scheduler.images.request_images import PlacedEmbeds, PlacedImage
from jaxserve.scheduler.plan import EmbedsItem, EncodeItem
from jaxserve.types import RequestId


@dataclass(slots=True, eq=False)
class StepItems:
    """The rows to fill before a step, as far as they were found to be missing."""

    max_patches: int
    """Patches of all images, unless there is only one; 0: encode none."""
    awaited: Collection[bytes]
    """Digests of images whose call is not done before the step."""
    images: dict[bytes, EncodeItem] = field(default_factory=dict)
    """By digest."""
    embeds: list[EmbedsItem] = field(default_factory=list)

    def may_encode(self, image: PlacedImage) -> bool:
        """Return True if an image may join those that are encoded: the first one always may."""
        encoded = sum(len(item.patches) for item in self.images.values())
        return len(image.patches) + encoded <= self.max_patches or bool(self.max_patches and not self.images)

    def add(self, image: PlacedImage | PlacedEmbeds, rows: np.ndarray, request_id: RequestId) -> None:
        """Fill the rows of an image, or of given embeddings, that a request needs first."""
        if isinstance(image, PlacedImage):
            self.images[image.digest] = image.item(rows, request_id)
        else:
            self.embeds.append(image.item(rows, request_id))


@dataclass(slots=True, eq=False)
class EncoderCall:
    """Images that are encoded together. Parts of equally many layers follow each other, perhaps with steps between them."""

    items: dict[bytes, EncodeItem]
    """By digest."""
    num_layers: int
    num_parts: int
    num_done: int = 0
    """Parts that were planned."""

    @property
    def is_done(self) -> bool:
        return self.num_done == self.num_parts

    def advance(self, *, is_whole: bool) -> list[EncodeItem]:
        """Return the images with the layers of the next part; is_whole: with those of all parts that are left."""
        start, self.num_done = self.num_done, self.num_parts if is_whole else self.num_done + 1
        if not start and self.is_done:
            return [*self.items.values()]
        layers = (self._first_layer(start), self._first_layer(self.num_done))
        return [replace(item, layers=layers) for item in self.items.values()]

    def _first_layer(self, part: int) -> int:
        return part * self.num_layers // self.num_parts


def num_parts(info: ImageInfo, items: Iterable[EncodeItem]) -> int:
    """Return the parts in which the encoder's smallest program that holds these images runs beside replies."""
    count = sum(len(item.patches) for item in items)
    return next((parts for size, parts in info.encoder_parts if size >= count), 1)
