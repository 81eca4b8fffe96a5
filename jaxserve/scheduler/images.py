"""Images and given embeddings in prompts: which embeddings the device keeps, and which images a step encodes.

    prompt tokens     text  image tokens  text  image tokens ...
    device            rows of embeddings, `ImageInfo.cache_rows` of them, which a step gathers by index

The rows of an image lie anywhere among them. They are found by the digest of the image, so that an image is encoded once as
long as its rows are kept; the image that was used the longest time ago goes first. A request holds the rows of an image from
the step that encodes or finds it until its last token is in a step that was planned: later steps run after that one, and may
overwrite the rows.

A chunk of a prompt ends before an image whose rows are not there and cannot be made in this step. Images are encoded in one
call before a step:

    no reply is generated    up to `max_patches` patches, and the step computes prompts as well
    replies are generated    up to `step_patches` patches, or one larger image; the step computes replies only, and the next
                             one computes prompts without encoding, unless all prompts wait for images

Embeddings that a client gave in place of tokens have rows as well, a page's worth of tokens at a time. Writing them takes no
arithmetic: they have no budget, and go to the device before the step that reads them.

A decoder may let the tokens of an image attend to each other in both directions (`ImageInfo.is_bidirectional`). Then a chunk
never ends inside an image: it ends before it, or a prompt that holds the image's rows gets tokens up to the image's end,
if need be from prompts of lower rank.

So a reply waits for one encoder call or for one chunk of prompts, never for both. A request never waits for rows that it holds
itself, and those who hold rows move at least with every second step: the rows of the largest image are enough for all to end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.ipc.messages import AddRequest, ImageInfo
from jaxserve.ipc.prompt_embeds import PromptEmbedsInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.scheduler.plan import NO_IMAGE_ROW, EmbedsItem, EncodeItem
from jaxserve.types import RequestId


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """One input of the encoder and the tokens that its embeddings stand for."""

    start: int
    end: int
    digest: bytes
    patches: np.ndarray  # uint8 [P, F]
    positions: np.ndarray  # int32 [P, 2]

    def item(self, rows: np.ndarray, request_id: RequestId) -> EncodeItem:
        """Return the work that fills `rows`."""
        return EncodeItem(self.patches, self.positions, rows, request_id)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedEmbeds:
    """Embeddings that a client gave, and the tokens that they stand for."""

    start: int
    end: int
    digest: bytes
    values: np.ndarray  # float32 [end - start, D]

    def item(self, rows: np.ndarray, request_id: RequestId) -> EmbedsItem:
        """Return the work that fills `rows`."""
        return EmbedsItem(self.values, rows, request_id)


@dataclass(frozen=True, slots=True, eq=False)
class RequestImages:
    """The images, or the given embeddings, of one request."""

    request_id: RequestId
    images: tuple[PlacedImage | PlacedEmbeds, ...]
    rope_positions: np.ndarray | None  # int32 [3, T] of the prompt; None: the place of each token
    rope_delta: int
    is_bidirectional: bool = False
    """True if each image's tokens see the whole image."""
    held: dict[int, np.ndarray] = field(default_factory=dict)
    """Rows of the images that are held, by their index."""

    @property
    def is_given(self) -> bool:
        """True if the client gave embeddings in place of tokens."""
        return any(isinstance(image, PlacedEmbeds) for image in self.images)

    @property
    def spans(self) -> list[tuple[int, int, bytes]]:
        """First token, end and digest of each image, for the names of pages."""
        return [(image.start, image.end, image.digest) for image in self.images]

    def overlapping(self, first: int, end: int) -> list[int]:
        """Return the indices of the images that have tokens among `first` ... `end - 1`."""
        return [i for i, image in enumerate(self.images) if image.start < end and first < image.end]

    def rows(self, first: int, count: int) -> np.ndarray:
        """Return the row of each of `count` tokens, whose images are held; NO_IMAGE_ROW for text."""
        rows = np.full(count, NO_IMAGE_ROW, np.int32)
        for i in self.overlapping(first, first + count):
            image = self.images[i]
            low, high = max(image.start, first), min(image.end, first + count)
            rows[low - first : high - first] = self.held[i][low - image.start : high - image.start]
        return rows

    def cut_by(self, end: int) -> PlacedImage | PlacedEmbeds | None:
        """Return the image that a chunk with the end `end` would cut, though its tokens see it whole; None if there is none."""
        if not self.is_bidirectional:
            return None
        return next((image for image in self.images if image.start < end < image.end), None)

    def key_ends(self, first: int, count: int) -> np.ndarray:
        """Return where the keys that each of `count` tokens sees end, int32: after it, or after its image."""
        ends = np.arange(first + 1, first + count + 1, dtype=np.int32)
        for i in self.overlapping(first, first + count) if self.is_bidirectional else ():
            image = self.images[i]
            ends[max(image.start - first, 0) : image.end - first] = image.end
        return ends

    def rope(self, first: int, count: int) -> np.ndarray:
        """Return the rotary positions of `count` tokens, int32 `[3, count]`."""
        places = np.arange(first, first + count, dtype=np.int32)
        if self.rope_positions is None:
            return np.tile(places, (3, 1))
        known = self.rope_positions[:, first : first + count]
        return np.concatenate([known, np.tile(places[known.shape[1] :] + self.rope_delta, (3, 1))], axis=1)


def images_of(message: AddRequest, *, is_bidirectional: bool = False) -> RequestImages | None:
    """Return the images or the given embeddings of a request that admission has passed; None without any."""
    if message.prompt_embeds:
        return RequestImages(message.request_id, _placed_embeds(message), None, 0)
    if not message.images:
        return None
    placed = []
    for image in message.images:
        positions = np.frombuffer(image.positions, "<i4").reshape(-1, 2)
        patches = np.frombuffer(image.patches, np.uint8).reshape(len(positions), -1)
        placed.append(PlacedImage(image.start, image.start + image.num_tokens, image.digest, patches, positions))
    rope = message.rope_positions
    turned = None if rope is None else np.frombuffer(rope.prompt, "<i4").reshape(3, -1)
    delta = 0 if rope is None else rope.delta
    return RequestImages(message.request_id, tuple(placed), turned, delta, is_bidirectional)


def _placed_embeds(message: AddRequest) -> tuple[PlacedEmbeds, ...]:
    return tuple(
        PlacedEmbeds(
            part.start,
            part.start + part.num_tokens,
            part.digest,
            np.frombuffer(part.values, "<f4").reshape(part.num_tokens, -1),
        )
        for part in message.prompt_embeds
    )


@dataclass(slots=True, eq=False)
class _Entry:
    """The rows of one image."""

    rows: np.ndarray
    num_holders: int


class EmbeddingRows:
    """The rows of embeddings on the device: who holds them, and which images they belong to."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By digest, the one that was used the longest time ago first."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Rows of images that requests hold."""
        return sum(len(entry.rows) for entry in self._entries.values() if entry.num_holders)

    def hold(self, digest: bytes) -> np.ndarray | None:
        """Return the rows of an image, held once more; None if it has none."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        entry.num_holders += 1
        return entry.rows

    def take(self, digest: bytes, count: int) -> np.ndarray | None:
        """Return rows for an image that has none, held once; None, and nothing changes, if others hold too many."""
        idle = [each for each, entry in self._entries.items() if not entry.num_holders]
        if len(self._free) + sum(len(self._entries[each].rows) for each in idle) < count:
            return None
        for each in idle:
            if len(self._free) >= count:
                break
            self._free += self._entries.pop(each).rows.tolist()
        rows = np.array(self._free[len(self._free) - count :], np.int32)
        del self._free[len(self._free) - count :]
        self._entries[digest] = _Entry(rows, 1)
        return rows

    def release(self, digest: bytes) -> None:
        """Hold the rows of an image once less."""
        entry = self._entries.get(digest)
        if entry is not None:  # else the device has lost it
            entry.num_holders -= 1

    def forget(self) -> None:
        """Forget every image, held or not: the device has lost the rows."""
        for entry in self._entries.values():
            self._free += entry.rows.tolist()
        self._entries.clear()


class ImagePolicy:
    """Decides which images are encoded before a step."""

    def __init__(self, info: ImageInfo | None, embeds: PromptEmbedsInfo | None = None, max_tokens: int = 0) -> None:
        """info: None if no images are read. embeds: None if no embeddings are taken. Not both are None.

        max_tokens: those of a step, at least one image and a token of every other request; only if `is_bidirectional`.
        """
        rows = info if info is not None else embeds
        assert rows is not None, "there are images or embeddings"
        self._max_patches = 0 if info is None else info.max_patches
        self._step_patches = self._max_patches if info is None or info.step_patches is None else info.step_patches
        self._rows = EmbeddingRows(rows.cache_rows)
        self._has_whole_images = info is not None and info.is_bidirectional
        self._max_tokens = max_tokens
        self._has_encoded = False
        """True if the last step encoded images and computed replies only."""
        self._num_queries = self._num_hits = 0
        """Images that steps needed and their requests did not hold, and those of them that had rows, since `add_stats`."""

    def cut(
        self,
        requests: Sequence[RequestImages | None],
        firsts: Sequence[int],
        counts: Sequence[int],
        are_replies: Sequence[bool],
    ) -> tuple[list[int], list[EncodeItem | EmbedsItem]]:
        """Return how many tokens each request computes from token `firsts` on, and the rows to fill before.

        These are at most `counts`, unless an image's tokens stay together. are_replies: True for requests whose prompt is
        computed.
        """
        for images, first in zip(requests, firsts, strict=True):
            if images is not None:
                self._release(images, [held for held in images.held if images.images[held].end <= first])
        has_replies = any(count and is_reply for count, is_reply in zip(counts, are_replies, strict=True))
        if has_replies and self._has_encoded:
            found, items = self._cut(requests, firsts, counts, 0)
            if any(count and not is_reply for count, is_reply in zip(found, are_replies, strict=True)):
                self._has_encoded = False
                return self._with_whole_images(requests, firsts, found, are_replies), items
        found, items = self._cut(requests, firsts, counts, self._step_patches if has_replies else self._max_patches)
        self._has_encoded = has_replies and any(isinstance(item, EncodeItem) for item in items)
        if self._has_encoded:
            found = [count if is_reply else 0 for count, is_reply in zip(found, are_replies, strict=True)]
        return self._with_whole_images(requests, firsts, found, are_replies), items

    def _with_whole_images(
        self,
        requests: Sequence[RequestImages | None],
        firsts: Sequence[int],
        counts: list[int],
        are_replies: Sequence[bool],
    ) -> list[int]:
        """Return counts under which no chunk ends inside an image whose tokens attend in both directions.

        The first request in rank whose chunk begins with an image, or in it, always gets the tokens up to its end.
        """
        if not self._has_whole_images:
            return counts
        counts, wanted = list(counts), {}
        for i, (images, first, count) in enumerate(zip(requests, firsts, counts, strict=True)):
            counts[i] = _whole(images, first, count)
            if images is not None and count and not counts[i]:
                image = images.cut_by(first + count)
                assert image is not None, "why the count is 0 now"
                wanted[i] = image.end - first
        prompts = [i for i, is_reply in enumerate(are_replies) if not is_reply]
        for rank, (i, count) in enumerate(wanted.items()):
            for other in reversed(prompts) if not rank else ():
                excess = sum(counts) + count - self._max_tokens
                if excess > 0 and other != i:
                    counts[other] = _whole(requests[other], firsts[other], max(counts[other] - excess, 0))
            if sum(counts) + count <= self._max_tokens:
                counts[i] = count
        return counts

    def _cut(
        self, requests: Sequence[RequestImages | None], firsts: Sequence[int], counts: Sequence[int], max_patches: int
    ) -> tuple[list[int], list[EncodeItem | EmbedsItem]]:
        """Return counts and items as `cut`. max_patches: patches of all images, unless there is only one; 0: encode none."""
        items: list[EncodeItem | EmbedsItem] = []
        found = [
            count
            if images is None or not count
            else self._hold(images, first, first + count, items, max_patches) - first
            for images, first, count in zip(requests, firsts, counts, strict=True)
        ]
        return found, items

    def release(self, images: RequestImages | None) -> None:
        """Hold no rows for a request any more."""
        if images is not None:
            self._release(images, list(images.held))

    def forget(self) -> None:
        """Forget every image: the device has lost the rows. No request holds any."""
        self._rows.forget()
        self._has_encoded = False

    def add_stats(self, stats: EngineStats) -> None:
        """Add the numbers since the last call, and the share of rows that are held."""
        stats.image_cache_usage_perc = self._rows.num_held / self._rows.num_rows
        stats.image_cache_queries, stats.image_cache_hits = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0

    def _hold(
        self, images: RequestImages, first: int, end: int, items: list[EncodeItem | EmbedsItem], max_patches: int
    ) -> int:
        """Hold the images of tokens `first` ... `end - 1`; returns the end of those that can be computed."""
        for i in images.overlapping(first, end):
            if i in images.held:
                continue
            image = images.images[i]
            rows = self._rows.hold(image.digest)
            is_hit = rows is not None
            if rows is None:
                if isinstance(image, PlacedImage) and not _may_encode(image, items, max_patches):
                    return max(first, image.start)
                rows = self._rows.take(image.digest, image.end - image.start)
                if rows is None:
                    return max(first, image.start)
                items.append(image.item(rows, images.request_id))
            if isinstance(image, PlacedImage):
                self._num_hits += is_hit
                self._num_queries += 1
            images.held[i] = rows
        return end

    def _release(self, images: RequestImages, indices: Sequence[int]) -> None:
        for i in indices:
            del images.held[i]
            self._rows.release(images.images[i].digest)


def _may_encode(image: PlacedImage, items: Sequence[EncodeItem | EmbedsItem], max_patches: int) -> bool:
    """Return True if an image may join those that are encoded in one call of `max_patches`: the first one always may."""
    encoded = [len(item.patches) for item in items if isinstance(item, EncodeItem)]
    return len(image.patches) + sum(encoded) <= max_patches or bool(max_patches and not encoded)


def _whole(images: RequestImages | None, first: int, count: int) -> int:
    """Return how many of `count` tokens from `first` on a chunk may have that ends in no image."""
    image = None if images is None or not count else images.cut_by(first + count)
    return count if image is None else max(image.start - first, 0)
