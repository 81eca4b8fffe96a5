"""Rows of embeddings: found by content, held while needed, given up by age; and chunks that end before an image."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.messages import AddRequest, ErrorInfo, RequestOutput
from jaxserve.ipc.prompt_embeds import PromptEmbeds
from jaxserve.ipc.prompt_images import PromptImage
from jaxserve.kv.manager import KVManager
from jaxserve.sampling.params import EngineSamplingParams
from jaxserve.scheduler.images.embedding_rows import EmbeddingRows
from jaxserve.scheduler.images.policy import ImagePolicy
from jaxserve.scheduler.images.request_images import PlacedImage, RequestImages, images_of
from jaxserve.scheduler.plan import NO_IMAGE_ROW, Buckets
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import RequestId

INFO = ImageInfo(max_patches=8, max_tokens=8, cache_rows=8, merge=1, patch_bytes=4)


def image(name: bytes, start: int, count: int) -> PlacedImage:
    return PlacedImage(start, start + count, name, np.zeros((count, 4), np.uint8), np.zeros((count, 2), np.int32))


def images(*placed: PlacedImage) -> RequestImages:
    return RequestImages(RequestId("a"), placed, None, 0)


def test_held_rows_stay_and_the_oldest_idle_image_goes_first() -> None:
    rows = EmbeddingRows(6)
    first, second = rows.take(b"a", 3), rows.take(b"b", 3)
    assert first is not None and second is not None and set(first) | set(second) == set(range(6))
    assert rows.take(b"c", 1) is None  # both are held
    rows.release(b"a")
    rows.release(b"b")
    assert rows.hold(b"a") is first  # used last, and held again
    taken = rows.take(b"c", 2)
    assert taken is not None and set(taken) < set(second)
    assert rows.hold(b"b") is None and rows.num_free == 1
    rows.forget()
    assert rows.num_free == 6 and rows.hold(b"a") is None


def test_a_chunk_ends_before_an_image_that_this_step_cannot_encode() -> None:
    policy, own = ImagePolicy(INFO), images(image(b"a", 2, 5), image(b"b", 9, 5))
    counts, items = policy.cut([None, own], [0, 0], [3, 20], [False] * 2)
    assert counts == [3, 9] and [len(item.patches) for item in items] == [5]  # 10 patches are more than 8
    assert (own.rows(0, 9) == NO_IMAGE_ROW).tolist() == [True] * 2 + [False] * 5 + [True] * 2
    counts, items = policy.cut([None, own], [3, 9], [1, 20], [False] * 2)
    assert counts == [1, 20] and len(items) == 1 and list(own.held) == [1]


def test_line_breaks_of_an_image_are_text_and_have_no_rows() -> None:
    placed = PlacedImage(2, 7, b"a", np.zeros((4, 4), np.uint8), np.zeros((4, 2), np.int32), line=2)
    policy, own = ImagePolicy(INFO), images(placed)
    counts, items = policy.cut([own], [0], [9], [False])
    assert counts == [9] and placed.num_rows == 4 and items[0].rows.tolist() == own.held[0].tolist()
    a, b, c, d = own.held[0].tolist()
    none = NO_IMAGE_ROW
    assert own.rows(0, 9).tolist() == [none, none, a, b, none, c, d, none, none]
    assert own.rows(4, 2).tolist() == [none, c]


def test_an_image_is_encoded_once_for_all_requests_and_waits_for_rows() -> None:
    policy, one, same, other = ImagePolicy(INFO), *(images(image(name, 0, 5)) for name in (b"a", b"a", b"c"))
    counts, items = policy.cut([one, same, other], [0, 0, 0], [4, 5, 5], [False] * 3)
    assert counts == [4, 5, 0] and len(items) == 1
    assert one.rows(0, 4).tolist() == same.rows(0, 4).tolist()
    policy.release(one)
    policy.release(same)
    counts, items = policy.cut([other], [0], [5], [False])
    assert counts == [5] and len(items) == 1


def test_a_reply_waits_for_an_encoder_call_or_a_chunk_and_never_for_both() -> None:
    policy = ImagePolicy(msgspec.structs.replace(INFO, step_patches=4, cache_rows=32))
    prompts = [images(*(image(bytes([i, j]), 3 * j, 2) for j in range(3))) for i in range(2)]
    firsts, calls, num_steps = [0, 0], [], 0
    while min(firsts) < 9:
        wanted = [min(9 - first, 5) for first in firsts]
        counts, items = policy.cut([None, *prompts], [20 + num_steps, *firsts], [1, *wanted], [True, False, False])
        assert counts[0] == 1 and sum(len(item.patches) for item in items) <= 4
        assert not (items and any(counts[1:])) and (items or any(counts[1:]))
        calls.append(len(items))
        firsts = [first + count for first, count in zip(firsts, counts[1:], strict=True)]
        num_steps += 1
    assert sum(calls) == 6 and 0 in calls
    alone, items = policy.cut([images(image(b"large", 0, 7))], [0], [7], [False])
    assert alone == [7] and len(items) == 1


def test_an_image_over_the_budget_is_encoded_alone() -> None:
    policy = ImagePolicy(msgspec.structs.replace(INFO, step_patches=4, cache_rows=32))
    prompt = images(image(b"a", 0, 7), image(b"b", 7, 2))
    counts, items = policy.cut([None, prompt], [9, 0], [1, 9], [True, False])
    assert counts == [1, 0] and [len(item.patches) for item in items] == [7]
    counts, items = policy.cut([None, prompt], [10, 0], [1, 9], [True, False])
    assert counts == [1, 7] and not items
    counts, items = policy.cut([None, prompt], [11, 7], [1, 2], [True, False])
    assert counts == [1, 0] and [len(item.patches) for item in items] == [2]


WHOLE = msgspec.structs.replace(INFO, is_bidirectional=True, cache_rows=64, max_patches=64)


def test_no_chunk_ends_inside_an_image_that_is_seen_whole() -> None:
    policy, own = ImagePolicy(WHOLE, max_tokens=12), images(image(b"a", 2, 5), image(b"b", 9, 5))
    own = dataclasses.replace(own, is_bidirectional=True)
    counts, items = policy.cut([own], [0], [6], [False])
    assert counts == [2] and len(items) == 1  # encoded, and computed with the next step
    counts, _ = policy.cut([own], [2], [3], [False])
    assert counts == [5]  # more than its share, as nothing else is computed
    assert own.key_ends(1, 7).tolist() == [2, 7, 7, 7, 7, 7, 8]
    counts, _ = policy.cut([own], [4], [6], [False])  # a prefix hit in the image
    assert counts == [5] and own.key_ends(4, 5).tolist() == [7, 7, 7, 8, 9]
    assert images(image(b"a", 2, 5)).key_ends(1, 7).tolist() == list(range(2, 9))


def test_the_first_image_in_rank_gets_its_tokens_from_prompts_and_not_from_replies() -> None:
    policy = ImagePolicy(WHOLE, max_tokens=12)
    one, two = (dataclasses.replace(images(image(name, 1, 8)), is_bidirectional=True) for name in (b"a", b"b"))
    requests, replies = [None, None, one, None, two], [True, False, False, False, False]
    counts, items = policy.cut(requests, [30, 0, 1, 0, 1], [1, 4, 3, 2, 2], replies)
    assert counts == [1, 0, 0, 0, 0] and len(items) == 2  # a reply, so the step encodes
    counts, _ = policy.cut(requests, [31, 0, 1, 0, 1], [1, 4, 3, 2, 2], replies)
    assert counts == [1, 3, 8, 0, 0] and sum(counts) == 12


def test_prompts_with_images_that_are_seen_whole_all_end_in_steps_that_are_just_large_enough() -> None:
    random = np.random.RandomState(0)
    for _ in range(30):
        prompts, ends = [], []
        for number in range(4):
            starts = np.cumsum(random.randint(6, 14, 3))
            placed = [image(bytes([number, i]), int(start), random.randint(1, 7)) for i, start in enumerate(starts)]
            prompts.append(dataclasses.replace(images(*placed), is_bidirectional=True))
            ends.append(int(starts[-1]) + random.randint(6, 20))
        policy, firsts = ImagePolicy(msgspec.structs.replace(WHOLE, cache_rows=8), max_tokens=6 + 3), [0] * 4
        for _ in range(400):
            left = [end - first for end, first in zip(ends, firsts, strict=True)]
            if not any(left):
                break
            shares = iter(random.multinomial(9, [0.25] * 4).tolist())
            counts, _ = policy.cut(prompts, firsts, [min(each, next(shares)) for each in left], [False] * 4)
            firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
            assert sum(counts) <= 9
            assert not any(own.cut_by(first) for own, first in zip(prompts, firsts, strict=True))
        assert firsts == ends


def test_an_image_that_is_too_large_for_the_memory_ends_its_request_and_not_the_engine() -> None:
    """A chunk never ends inside such an image, so a smaller step cannot hold it: memory is short again and again."""
    config, error = SchedulerConfig(max_num_seqs=2), ErrorInfo("InternalError", "out of memory")
    kv, buckets = KVManager(64, 4, 64), Buckets((1, 2), (2, 4, 8), 2)
    scheduler = Scheduler(config, kv, buckets, 64, frozenset({2}), 100, images=WHOLE)
    placed = [PromptImage(0, 8, b"d" * 32, bytes(8 * 4), bytes(8 * 8))]
    message = AddRequest(RequestId("a"), [7] * 9, EngineSamplingParams(max_tokens=1), images=placed)
    assert scheduler.add(message) is None
    ends: list[RequestOutput] = []
    for _ in range(10):
        plan = scheduler.schedule()
        if plan is None:
            break
        assert plan.num_tokens == 8
        ends += scheduler.fail(plan, error, may_shrink=True)
    assert [(end.request_id, end.error) for end in ends] == [("a", error)]
    assert not scheduler.has_work


def test_an_image_is_shared_only_among_requests_with_the_same_salt() -> None:
    def placed(salt: str | None) -> RequestImages:
        sent = [PromptImage(0, 3, b"d" * 32, bytes(3 * 4), bytes(3 * 8))]
        message = AddRequest(RequestId("a"), [7] * 4, EngineSamplingParams(max_tokens=1), cache_salt=salt, images=sent)
        found = images_of(message)
        assert found is not None
        return found

    policy = ImagePolicy(msgspec.structs.replace(INFO, cache_rows=32))
    num_encoded = []
    for salt in ("a", "b", None, "a", "b", None):
        own = placed(salt)
        _, items = policy.cut([own], [0], [4], [False])
        num_encoded.append(len(items))
        policy.release(own)
    assert num_encoded == [1, 1, 1, 0, 0, 0]


def test_given_embeddings_are_shared_only_among_requests_with_the_same_salt() -> None:
    part = PromptEmbeds(0, 1, b"d" * 32, bytes(4))
    digests = set()
    for salt in ("a", "b", None, "a"):
        sampling = EngineSamplingParams(max_tokens=1)
        message = AddRequest(RequestId("a"), [7], sampling, cache_salt=salt, prompt_embeds=[part])
        found = images_of(message)
        assert found is not None
        digests.add(found.images[0].digest)
    assert len(digests) == 3
