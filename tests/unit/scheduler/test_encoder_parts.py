"""Encoder calls in parts: one before a step while replies are generated, and what ends or delays a call."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from jaxserve.ipc.image_info import ImageInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.scheduler.images.policy import ImagePolicy
from jaxserve.scheduler.images.request_images import PlacedImage, RequestImages
from jaxserve.scheduler.plan import EmbedsItem, EncodeItem
from jaxserve.types import RequestId

UNITS = 5
INFO = ImageInfo(
    max_patches=8,
    max_tokens=8,
    cache_rows=32,
    merge=1,
    patch_bytes=1,
    encoder_parts=((4, (1,)), (8, (1, 3, UNITS))),
)
PARTS = [(0, 1), (1, 3), (3, UNITS)]
"""Calls of programs in each part of an encoder call of more than four patches."""


def image(number: int, start: int, count: int) -> PlacedImage:
    """Return an image whose patches, and name, are a number."""
    return PlacedImage(
        start, start + count, bytes([number]), np.full((count, 1), number, np.uint8), np.zeros((count, 2), np.int32)
    )


def prompt(*placed: PlacedImage) -> RequestImages:
    return RequestImages(RequestId("a"), placed, None, 0)


def beside_a_reply(
    policy: ImagePolicy, prompts: list[RequestImages], firsts: list[int], counts: list[int]
) -> tuple[list[int], list[tuple[int, int] | None]]:
    """Return the tokens that prompts get in a step that computes a reply, and the part of each image of the step."""
    flags = [True] + [False] * len(prompts)
    found, items = policy.cut([None, *prompts], [99, *firsts], [1, *counts], flags)
    assert found[0] == 1
    assert not (items and any(found[1:])), "a part of a call or a chunk of prompts"
    return found[1:], [item.units for item in items if isinstance(item, EncodeItem)]


def num_held(policy: ImagePolicy) -> float:
    """Return the number of rows that are held."""
    stats = EngineStats()
    policy.add_stats(stats)
    return stats.image_cache_usage_perc * INFO.cache_rows


def test_one_part_goes_before_a_step_with_replies_and_prompts_move_between_two_parts() -> None:
    policy, own, text = ImagePolicy(INFO), prompt(image(1, 2, 7)), prompt()
    steps, firsts = [], [0, 0]
    for _ in range(7):
        counts, layers = beside_a_reply(policy, [own, text], firsts, [9 - firsts[0], min(3, 6 - firsts[1])])
        firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
        steps.append((counts, layers))
    assert (
        steps
        == [
            ([0, 0], PARTS[:1]),
            ([2, 3], []),  # up to the image
            ([0, 0], PARTS[1:2]),
            ([0, 3], []),
            ([0, 0], PARTS[2:]),
            ([7, 0], []),
            ([0, 0], []),
        ]
    )


SHARED = msgspec.structs.replace(INFO, step_tokens=2)


def test_a_step_has_as_many_parts_of_a_call_as_requests_wait_for_images() -> None:
    def parts(num_requests: int, max_tokens: int) -> list[tuple[int, int]]:
        policy = ImagePolicy(SHARED, max_tokens=max_tokens)
        waiting = [prompt(image(1, 0, 5)), *(prompt(image(2, 0, 5)) for _ in range(num_requests - 1))]
        found = []
        for _ in PARTS:
            counts, units = beside_a_reply(policy, waiting, [0] * num_requests, [5] * num_requests)
            found += units
            if any(counts):
                break
        return [each for each in found if each is not None]

    assert parts(1, 100) == PARTS
    assert parts(2, 100) == [(0, 3), (3, UNITS)]
    assert parts(3, 100) == []  # in one part, as without replies
    assert parts(3, 5) == [(0, 3), (3, UNITS)]  # no more than a step's tokens allow


def test_chunks_with_images_share_the_tokens_of_the_requests_that_wait() -> None:
    policy, text = ImagePolicy(SHARED, max_tokens=100), prompt()
    own, other = prompt(image(1, 3, 4)), prompt(image(2, 0, 3))
    policy.cut([own, other], [0, 0], [4, 1], [False] * 2)  # both have rows
    steps, firsts = [], [0, 1, 0]
    for _ in range(5):
        counts, _ = beside_a_reply(policy, [own, other, text], firsts, [9 - firsts[0], 5 - firsts[1], 9])
        firsts = [first + count for first, count in zip(firsts[:2], counts, strict=False)] + [0]
        steps.append(counts)
    assert steps == [
        [4, 0, 9],  # the tokens of two requests; a text has any number
        [4, 0, 9],
        [1, 2, 9],  # only the second one waits, and text after an image is as free as other text
        [0, 2, 9],
        [0, 0, 9],
    ]


def test_without_replies_chunks_with_images_have_any_number_of_tokens() -> None:
    policy, own = ImagePolicy(SHARED, max_tokens=100), prompt(image(1, 1, 7))
    assert policy.cut([own], [0], [20], [False])[0] == [20]


def test_a_call_that_is_no_more_work_than_a_step_has_one_part() -> None:
    policy, own = ImagePolicy(INFO), prompt(image(1, 0, 4))
    assert beside_a_reply(policy, [own], [0], [4]) == ([0], [None])
    assert beside_a_reply(policy, [own], [0], [4]) == ([4], [])


def test_without_replies_all_parts_go_before_one_step() -> None:
    policy, own = ImagePolicy(INFO), prompt(image(1, 2, 7))
    counts, items = policy.cut([own], [0], [9], [False])
    assert counts == [9] and [item.units for item in items if isinstance(item, EncodeItem)] == [None]
    other = prompt(image(2, 2, 7))
    assert beside_a_reply(policy, [other], [0], [9]) == ([0], PARTS[:1])
    counts, items = policy.cut([other], [0], [9], [False])  # the reply has ended
    assert counts == [9] and [item.units for item in items if isinstance(item, EncodeItem)] == [(1, UNITS)]
    assert num_held(policy) == 7 + 7


def test_a_second_request_waits_for_the_same_image_and_others_wait_for_the_end_of_the_call() -> None:
    policy, one, same, other = ImagePolicy(INFO), *(prompt(image(number, 0, 5)) for number in (1, 1, 2))
    assert beside_a_reply(policy, [one], [0], [5]) == ([0], PARTS[:1])
    firsts, layers = [0] * 3, []
    for _ in range(2):
        counts, step = beside_a_reply(policy, [one, same, other], firsts, [5] * 3)
        assert counts == [0] * 3
        layers += step
    assert layers == PARTS[1:]
    counts, step = beside_a_reply(policy, [one, same, other], firsts, [5] * 3)
    assert (counts, step) == ([5, 5, 0], [])
    assert one.rows(0, 5).tolist() == same.rows(0, 5).tolist()
    assert beside_a_reply(policy, [other], [0], [5]) == ([0], PARTS[:1])
    stats = EngineStats()
    policy.add_stats(stats)
    assert (stats.image_cache_queries, stats.image_cache_hits) == (3, 1)


def test_a_call_that_no_request_waits_for_ends_and_its_rows_are_free() -> None:
    policy, own, same = ImagePolicy(INFO), prompt(image(1, 0, 3), image(2, 3, 3)), prompt(image(2, 0, 3))
    assert beside_a_reply(policy, [own, same], [0, 0], [6, 3]) == ([0, 0], PARTS[:1] * 2)
    policy.release(own)  # the other one still waits for one of the two images
    assert beside_a_reply(policy, [same], [0], [3]) == ([0], PARTS[1:2] * 2)
    policy.release(same)
    assert num_held(policy) == 0
    assert beside_a_reply(policy, [own], [0], [6]) == ([0], PARTS[:1] * 2)


def test_what_the_device_has_lost_is_encoded_from_the_first_part() -> None:
    policy, own = ImagePolicy(INFO), prompt(image(1, 0, 7))
    assert beside_a_reply(policy, [own], [0], [7]) == ([0], PARTS[:1])
    policy.release(own)
    policy.forget()
    assert num_held(policy) == 0
    assert [beside_a_reply(policy, [own], [0], [7])[1] for _ in range(3)] == [[part] for part in PARTS]


def test_a_call_waits_if_no_prompt_could_be_computed_after_it() -> None:
    policy, own, other = ImagePolicy(INFO), prompt(image(1, 0, 7)), prompt(image(2, 0, 7))
    assert beside_a_reply(policy, [own], [0], [7]) == ([0], PARTS[:1])
    counts, items = policy.cut([own, other], [0, 0], [0, 7], [False] * 2)  # the first one waits for a mask, say
    assert counts == [0, 0] and not items
    counts, items = policy.cut([own, other], [0, 0], [7, 7], [False] * 2)
    assert counts == [7, 0] and [item.units for item in items if isinstance(item, EncodeItem)] == [(1, UNITS)]


class Device:
    """Activations and rows, by the numbers of images."""

    def __init__(self) -> None:
        self.images: list[int] = []
        self.next_unit = UNITS
        self.rows: dict[int, int] = {}

    def run(self, items: Sequence[EncodeItem | EmbedsItem]) -> None:
        """Run a part of a call, which goes on where the last one ended, or begins."""
        images = [item for item in items if isinstance(item, EncodeItem)]
        if not images:
            return
        (first, end), names = images[0].units or (0, UNITS), [int(item.patches[0, 0]) for item in images]
        if first:
            assert (names, first) == (self.images, self.next_unit)
        self.images, self.next_unit = names, end
        if end == UNITS:
            self.rows |= {row: name for item, name in zip(images, names, strict=True) for row in item.rows.tolist()}


@pytest.mark.parametrize("step_tokens", [None, 2])
@pytest.mark.parametrize("seed", range(8))
def test_prompts_read_the_rows_of_their_images_whatever_is_aborted_and_whenever_replies_run(
    seed: int, step_tokens: int | None
) -> None:
    random = np.random.RandomState(seed)
    info = msgspec.structs.replace(INFO, cache_rows=16, step_patches=7, step_tokens=step_tokens)
    policy, device = ImagePolicy(info, max_tokens=5), Device()
    requests: list[RequestImages | None] = []
    firsts: list[int] = []
    num_ended = num_aborted = 0
    for step in range(700):
        if len(requests) < 5 and step < 500:
            starts = np.cumsum(random.randint(8, 12, random.randint(1, 4)))
            placed = [image(random.randint(1, 9), int(start), 1) for start in starts]
            placed = [
                image(each.digest[0], each.start, 2 + each.digest[0] % 6) for each in placed
            ]  # one size by content
            requests.append(prompt(*placed))
            firsts.append(0)
        has_reply = random.rand() < 0.7
        counts = [min(24 - first, int(random.randint(0, 9))) for first in firsts]
        if not has_reply and not any(counts):
            continue
        replies, flags = [None] * has_reply, [True] * has_reply + [False] * len(requests)
        found, items = policy.cut([*replies, *requests], [99] * has_reply + firsts, [1] * has_reply + counts, flags)
        device.run(items)
        found = found[has_reply:]
        for own, first, count in zip(requests, firsts, found, strict=True):
            assert own is not None
            for number, row in zip(range(first, first + count), own.rows(first, count).tolist(), strict=True):
                names = [each.digest[0] for each in own.images if each.start <= number < each.end]
                assert names == ([] if row < 0 else [device.rows[row]])
        firsts = [first + count for first, count in zip(firsts, found, strict=True)]
        for index in reversed(range(len(requests))):
            is_aborted = random.rand() < 0.03
            if firsts[index] == 24 or is_aborted:
                policy.release(requests.pop(index))
                del firsts[index]
                num_aborted += is_aborted
                num_ended += 1
    assert not requests and num_ended > 20 and num_aborted
    assert num_held(policy) == 0
