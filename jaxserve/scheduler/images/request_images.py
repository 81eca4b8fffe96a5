"""The images, or the given embeddings, of one request: their tokens, rows of embeddings and positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.messages import AddRequest
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
    line: int = 0
    """Embeddings between two tokens that are line breaks; 0: there are none."""
    sources: np.ndarray | None = None  # int32 [N, S], see `EncodeItem`

    @property
    def num_rows(self) -> int:
        """Embeddings: one for each token but line breaks."""
        length = self.end - self.start
        return length - length // (self.line + 1) if self.line else length

    def token_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the row of each token; NO_IMAGE_ROW for line breaks. rows: those of the embeddings."""
        if not self.line:
            return rows
        lines = -(-self.num_rows // self.line)
        padded = np.full((lines, self.line + 1), NO_IMAGE_ROW, np.int32)
        padded[:, : self.line] = rows.reshape(lines, self.line)
        return padded.ravel()[: self.end - self.start]

    def item(self, rows: np.ndarray, request_id: RequestId) -> EncodeItem:
        """Return the work that fills `rows`."""
        return EncodeItem(self.patches, self.positions, rows, request_id, self.sources)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedEmbeds:
    """Embeddings that a client gave, and the tokens that they stand for."""

    start: int
    end: int
    digest: bytes
    values: np.ndarray  # float32 [end - start, D]

    @property
    def num_rows(self) -> int:
        """Embeddings: one for each token."""
        return self.end - self.start

    def token_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the row of each token."""
        return rows

    def item(self, rows: np.ndarray, request_id: RequestId) -> EmbedsItem:
        """Return the work that fills `rows`."""
        return EmbedsItem(self.values, rows, request_id)


class Span(NamedTuple):
    """Tokens of a prompt that attend to each other in both directions."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class RequestImages:
    """The images, or the given embeddings, of one request."""

    request_id: RequestId
    images: tuple[PlacedImage | PlacedEmbeds, ...]
    rope_positions: np.ndarray | None  # int32 [3, T] of the prompt; None: the place of each token
    rope_delta: int
    is_bidirectional: bool = False
    """True if each image's tokens see the whole image."""
    prompt: tuple[int, bytes] | None = None
    """End and digest of a prompt whose tokens all see each other; None: they do not."""
    held: dict[int, np.ndarray] = field(default_factory=dict)
    """Rows of the images that are held, by their index."""

    @property
    def is_given(self) -> bool:
        """True if the client gave embeddings in place of tokens."""
        return any(isinstance(image, PlacedEmbeds) for image in self.images)

    def is_waiting(self, first: int) -> bool:
        """Return True if a request that has computed `first` tokens misses some of an image."""
        return any(isinstance(image, PlacedImage) and image.end > first for image in self.images)

    @property
    def spans(self) -> list[tuple[int, int, bytes]]:
        """First token, end and digest of each image, for the names of pages."""
        whole = [] if self.prompt is None else [(0, *self.prompt)]
        return whole + [(image.start, image.end, image.digest) for image in self.images]

    @property
    def _whole(self) -> list[Span]:
        """Tokens that are seen whole."""
        if self.prompt is not None:
            return [Span(0, self.prompt[0])]
        return [Span(image.start, image.end) for image in self.images] if self.is_bidirectional else []

    def overlapping(self, first: int, end: int) -> list[int]:
        """Return the indices of the images that have tokens among `first` ... `end - 1`."""
        return [i for i, image in enumerate(self.images) if image.start < end and first < image.end]

    def rows(self, first: int, count: int) -> np.ndarray:
        """Return the row of each of `count` tokens, whose images are held; NO_IMAGE_ROW for text."""
        rows = np.full(count, NO_IMAGE_ROW, np.int32)
        for i in self.overlapping(first, first + count):
            image = self.images[i]
            low, high = max(image.start, first), min(image.end, first + count)
            own = image.token_rows(self.held[i])
            rows[low - first : high - first] = own[low - image.start : high - image.start]
        return rows

    def cut_by(self, end: int) -> Span | None:
        """Return the image or prompt that a chunk with the end `end` would cut, though its tokens see it whole; None if there is none."""
        return next((span for span in self._whole if span.start < end < span.end), None)

    def key_ends(self, first: int, count: int) -> np.ndarray:
        """Return where the keys that each of `count` tokens sees end, int32: after it, or after its image or prompt."""
        ends = np.arange(first + 1, first + count + 1, dtype=np.int32)
        for span in self._whole:
            ends[max(span.start - first, 0) : max(span.end - first, 0)] = span.end
        return ends

    def rope(self, first: int, count: int) -> np.ndarray:
        """Return the rotary positions of `count` tokens, int32 `[3, count]`."""
        places = np.arange(first, first + count, dtype=np.int32)
        if self.rope_positions is None:
            return np.tile(places, (3, 1))
        known = self.rope_positions[:, first : first + count]
        return np.concatenate([known, np.tile(places[known.shape[1] :] + self.rope_delta, (3, 1))], axis=1)


def images_of(message: AddRequest, info: ImageInfo | None = None) -> RequestImages | None:
    """Return the images or the given embeddings of a request that admission has passed, or a prompt that is seen whole; None without any."""
    if message.prompt_embeds:
        return RequestImages(message.request_id, _placed_embeds(message), None, 0)
    is_whole = info is not None and info.whole_prompt_tokens > 0
    if not message.images and not is_whole:
        return None
    placed = []
    for image in message.images:
        positions = np.frombuffer(image.positions, "<i4").reshape(-1, 2)
        patches = np.frombuffer(image.patches, np.uint8).reshape(len(positions), -1)
        end = image.start + image.length
        digest = _salted(image.digest, message.cache_salt)
        sources = np.frombuffer(image.sources, "<i4").reshape(image.num_tokens, -1) if image.sources else None
        placed.append(PlacedImage(image.start, end, digest, patches, positions, image.line, sources))
    rope = message.rope_positions
    turned = None if rope is None else np.frombuffer(rope.prompt, "<i4").reshape(3, -1)
    delta = 0 if rope is None else rope.delta
    is_bidirectional = info is not None and info.is_bidirectional
    prompt = (len(message.prompt_token_ids), _prompt_digest(message)) if is_whole else None
    return RequestImages(message.request_id, tuple(placed), turned, delta, is_bidirectional, prompt)


def _prompt_digest(message: AddRequest) -> bytes:
    """Return a digest of a whole prompt: if its tokens see each other, pages of it serve no other prompt."""
    tokens = np.array(message.prompt_token_ids, "<i4").tobytes()
    return sha256(b"".join([tokens, *(image.digest for image in message.images)])).digest()


def _placed_embeds(message: AddRequest) -> tuple[PlacedEmbeds, ...]:
    return tuple(
        PlacedEmbeds(
            part.start,
            part.start + part.num_tokens,
            _salted(part.digest, message.cache_salt),
            np.frombuffer(part.values, "<f4").reshape(part.num_tokens, -1),
        )
        for part in message.prompt_embeds
    )


def _salted(digest: bytes, salt: str | None) -> bytes:
    """Return the digest of an input among requests with the same salt: times tell no other request that it was sent."""
    return digest if salt is None else sha256(salt.encode("utf-8", "surrogatepass") + digest).digest()
