"""Decides which images a step encodes, and how many tokens of each prompt it computes.

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

While replies are generated, work for images has a budget: `step_tokens` for each request whose images are not computed. A call with
more arithmetic than so many tokens of a prompt runs in parts, each before a step of its own (`EncoderCall`), and a step has at most
that many tokens of chunks with images. So a step has little such work while one request waits for it, and as much as any step
while many do. Prompts wait for a call's images until the last part; other images wait for the end of the call. Its rows are free again when no request holds any of its images. If no reply is generated any more, the rest of it goes before one step.

Embeddings that a client gave in place of tokens have rows as well, a page's worth of tokens at a time. Writing them takes no
arithmetic: they have no budget, and go to the device before the step that reads them.

A decoder may let the tokens of an image attend to each other in both directions (`ImageInfo.is_bidirectional`). Then a chunk
never ends inside an image: it ends before it, or a prompt that holds the image's rows gets tokens up to the image's end,
if need be from prompts of lower rank. If a whole prompt is seen so, it has one image at most, and no token before the image has its rows.

So a reply waits for one part of an encoder call or for one chunk of prompts, never for both. A request never waits for rows that
it holds itself, a call needs no further rows, and those who hold rows move at least with every second step after it: the rows of
the largest image are enough for all to end.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.prompt_embeds import PromptEmbedsInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.scheduler.images.embedding_rows import EmbeddingRows
from jaxserve.scheduler.images.encoder_call import EncoderCall, StepItems, part_ends
from jaxserve.scheduler.images.request_images import PlacedImage, RequestImages
from jaxserve.scheduler.plan import EmbedsItem, EncodeItem


class ImagePolicy:
    """Decides which images are encoded before a step."""

    def __init__(self, info: ImageInfo | None, embeds: PromptEmbedsInfo | None = None, max_tokens: int = 0) -> None:
        """info: None if no images are read. embeds: None if no embeddings are taken. Not both are None.

        max_tokens: those of a step; if `is_bidirectional`, at least one image and a token of every other request.
        """
        rows = info if info is not None else embeds
        assert rows is not None, "there are images or embeddings"
        self._info = info
        self._max_patches = 0 if info is None else info.max_patches
        self._step_patches = self._max_patches if info is None or info.step_patches is None else info.step_patches
        self._step_tokens = None if info is None else info.step_tokens
        self._rows = EmbeddingRows(rows.cache_rows)
        self._has_whole_images = info is not None and info.is_bidirectional
        self._max_tokens = max_tokens
        self._call: EncoderCall | None = None
        """The call whose first parts have run; it holds the rows of its images."""
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
        num_parts = self._num_parts(requests, firsts) if has_replies else None
        num_tokens = None if num_parts is None or self._step_tokens is None else num_parts * self._step_tokens
        awaited = frozenset(self._call.items if self._call is not None and has_replies else ())
        if has_replies and self._has_encoded:
            step = StepItems(0, awaited, num_tokens)
            found = self._cut(requests, firsts, counts, step)
            if any(count and not is_reply for count, is_reply in zip(found, are_replies, strict=True)):
                self._has_encoded = False
                return self._with_whole_images(requests, firsts, found, are_replies), [*step.embeds]
        budget = self._step_patches if has_replies else self._max_patches
        step = StepItems(budget if self._call is None else 0, awaited, num_tokens)
        found = self._cut(requests, firsts, counts, step)
        encoded = self._encode(step.images, num_parts) if any(found) else []
        self._has_encoded = has_replies and bool(encoded)
        if self._has_encoded:
            found = [count if is_reply else 0 for count, is_reply in zip(found, are_replies, strict=True)]
        return self._with_whole_images(requests, firsts, found, are_replies), [*encoded, *step.embeds]

    def _num_parts(self, requests: Sequence[RequestImages | None], firsts: Sequence[int]) -> int:
        """Return the parts of a call that go before a step with replies: one for each request that waits for images."""
        most = 1 if self._step_tokens is None else self._max_tokens // self._step_tokens
        waiting = zip(requests, firsts, strict=True)
        wanted = sum(images is not None and images.is_waiting(first) for images, first in waiting)
        return max(1, min(wanted, most))

    def _encode(self, images: dict[bytes, EncodeItem], num_parts: int | None) -> list[EncodeItem]:
        """Return the next parts of the call; None: all that are left. images: by digest, those of a new call if there is none."""
        call = self._call
        if call is None:
            if not images or self._info is None:
                return []
            call = EncoderCall(images, part_ends(self._info, images.values()))
            for digest in images:
                self._rows.hold(digest)
        part = call.advance(num_parts)
        self._call = None if call.is_done else call
        if call.is_done:
            for digest in call.items:
                self._rows.release(digest)
        return part

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
        self,
        requests: Sequence[RequestImages | None],
        firsts: Sequence[int],
        counts: Sequence[int],
        step: StepItems,
    ) -> list[int]:
        """Return counts as `cut`, and add what is to be filled to `step`."""
        return [
            count
            if images is None or not count
            else step.cut(images, first, self._hold(images, first, first + count, step)) - first
            for images, first, count in zip(requests, firsts, counts, strict=True)
        ]

    def release(self, images: RequestImages | None) -> None:
        """Hold no rows for a request any more."""
        if images is not None:
            self._release(images, list(images.held))

    def forget(self) -> None:
        """Forget every image: the device has lost the rows, or its weights have changed. No request holds any."""
        self._rows.forget()
        self._call = None
        self._has_encoded = False

    def add_stats(self, stats: EngineStats) -> None:
        """Add the numbers since the last call, and the share of rows that are held."""
        stats.image_cache_usage_perc = self._rows.num_held / self._rows.num_rows
        stats.image_cache_queries, stats.image_cache_hits = self._num_queries, self._num_hits
        self._num_queries = self._num_hits = 0

    def _hold(self, images: RequestImages, first: int, end: int, step: StepItems) -> int:
        """Hold the images of tokens `first` ... `end - 1`; returns the end of those that can be computed."""
        needed = end if images.prompt is None else max(end, images.prompt[0])
        for i in images.overlapping(first, needed):
            image = images.images[i]
            if (i not in images.held and not self._find(images, i, step)) or image.digest in step.awaited:
                return first if images.prompt is not None else max(first, image.start)
        return end

    def _find(self, images: RequestImages, index: int, step: StepItems) -> bool:
        """Hold the rows of one image, which the step fills if they are new; returns False if there are none."""
        image = images.images[index]
        rows = self._rows.hold(image.digest)
        is_hit = rows is not None
        if rows is None:
            if isinstance(image, PlacedImage) and not step.may_encode(image):
                return False
            rows = self._rows.take(image.digest, image.num_rows)
            if rows is None:
                return False
            step.add(image, rows, images.request_id)
        if isinstance(image, PlacedImage):
            self._num_hits += is_hit
            self._num_queries += 1
        images.held[index] = rows
        return True

    def _release(self, images: RequestImages, indices: Sequence[int]) -> None:
        for i in indices:
            del images.held[i]
            self._rows.release(images.images[i].digest)
        call = self._call
        if call is not None and not any(self._rows.num_holders(digest) > 1 for digest in call.items):
            self._call = None  # only the call itself holds them
            for digest in call.items:
                self._rows.drop(digest)


def _whole(images: RequestImages | None, first: int, count: int) -> int:
    """Return how many of `count` tokens from `first` on a chunk may have that ends in no image."""
    image = None if images is None or not count else images.cut_by(first + count)
    return count if image is None else max(image.start - first, 0)
