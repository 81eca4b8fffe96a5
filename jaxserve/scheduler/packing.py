"""Packs the rows of a step into arrays, and chooses between the decode and the mixed program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from jaxserve.kv.states import RecurrentStates
from jaxserve.scheduler.images.request_images import RequestImages
from jaxserve.scheduler.plan import (
    NO_IMAGE_ROW,
    NO_TARGET,
    UNREAD_TOKEN,
    Buckets,
    EmbedsItem,
    EncodeItem,
    Mask,
    StepPlan,
)
from jaxserve.scheduler.request import Request
from jaxserve.types import NO_LOGPROBS, ProgramKind, RequestId

_TEXT: Final = RequestImages(RequestId(""), (), None, 0)
"""The images of a request without any."""


def pack(
    requests: list[Request],
    counts: list[int],
    buckets: Buckets,
    num_steps: int,
    started: list[Request],
    states: Sequence[RecurrentStates] = (),
    row_items: Sequence[EncodeItem | EmbedsItem] = (),
) -> tuple[StepPlan, list[Request]]:
    """Return the plan in which request i computes its next `counts[i]` tokens, and the requests in row order.

    Requests with a count of 0 have no row. The arrays are copies: later changes of the requests do not reach the plan.
    started: the requests that have just got their slots. states: slots of recurrent states by data
    rank; none for a model without.
    row_items: images to encode and embeddings to write before the step.
    """
    rows = [i for i, count in enumerate(counts) if count == 1]
    num_single = len(rows)
    rows += [i for i, count in enumerate(counts) if count > 1]
    ordered = [requests[i] for i in rows]
    num_scheduled = np.array([counts[i] for i in rows], np.int32)
    num_computed = np.array([request.num_computed_tokens for request in ordered], np.int32)
    num_known = np.array([request.num_tokens + request.num_unread_tokens for request in ordered], np.int32)
    is_sampling = num_computed + num_scheduled == num_known

    num_rows = len(ordered)
    token_ids = _token_ids(ordered, num_scheduled)
    masks, num_top_logprobs, num_prompt_logprobs = _wanted(ordered, is_sampling)
    targets = None
    if num_prompt_logprobs > NO_LOGPROBS:
        targets = np.concatenate([each.targets(count) for each, count in zip(ordered, num_scheduled, strict=True)])
    image_rows, rope_positions, key_ends = _images(ordered, num_computed, num_scheduled)
    is_decode = num_single == num_rows and targets is None and image_rows is None
    kind: ProgramKind = "decode" if is_decode else "mixed"
    plan = StepPlan(
        kind=kind,
        bucket=buckets.pick(kind, num_rows if kind == "decode" else len(token_ids)),
        request_ids=tuple(request.request_id for request in ordered),
        slots=np.array([request.slot for request in ordered], np.int32),
        num_scheduled_tokens=num_scheduled,
        num_computed_tokens=num_computed,
        token_ids=token_ids,
        block_tables=_matrix([request.table.row for request in ordered]),
        is_sampling=is_sampling,
        sampling=_matrix([request.sampling_row for request in ordered]),
        length_limits=np.array([request.length_limit for request in ordered], np.int32),
        stop_token_ids=_matrix([request.stop_row for request in ordered]),
        num_top_logprobs=num_top_logprobs,
        num_steps=num_steps,
        num_prompt_logprobs=num_prompt_logprobs,
        targets=targets,
        next_token_ids=_next_token_ids(ordered, num_scheduled, is_sampling),
        slot_inits=tuple(request.slot_init() for request in started if request.needs_state),
        adapters=_adapters(ordered),
        masks=masks,
        state_slots=_state_slots(states, ordered, num_computed + num_scheduled, num_known, num_steps)
        if states
        else None,
        encode_items=tuple(item for item in row_items if isinstance(item, EncodeItem)),
        embeds_items=tuple(item for item in row_items if isinstance(item, EmbedsItem)),
        image_rows=image_rows,
        rope_positions=rope_positions,
        key_ends=key_ends,
    )
    return plan, ordered


def _token_ids(ordered: list[Request], counts: np.ndarray) -> np.ndarray:
    """Return the step's tokens, row by row; UNREAD_TOKEN for those that are not read yet."""
    token_ids = np.full(int(counts.sum()), UNREAD_TOKEN, np.int32)
    start = 0
    for request, count in zip(ordered, counts.tolist(), strict=True):
        if not request.num_unread_tokens:
            token_ids[start : start + count] = request.next_tokens(count)
        start += count
    return token_ids


def _next_token_ids(ordered: list[Request], counts: np.ndarray, is_sampling: np.ndarray) -> np.ndarray | None:
    """Return the known token after those of each row that samples nothing; None if all rows sample."""
    if is_sampling.all():
        return None
    found = np.full(len(ordered), NO_TARGET, np.int32)
    for row in np.flatnonzero(~is_sampling):
        request = ordered[row]
        found[row] = request.tokens[request.num_computed_tokens + counts[row]]
    return found


def _wanted(ordered: list[Request], is_sampling: np.ndarray) -> tuple[tuple[Mask, ...], int, int]:
    """Return the masks of grammars, and the alternatives of a sampled and of a prompt's token that some row wants."""
    masks: list[Mask] = []
    num_top_logprobs = num_prompt_logprobs = NO_LOGPROBS
    for request, samples in zip(ordered, is_sampling.tolist(), strict=True):
        if request.is_plain:
            continue
        if request.grammar is not None and samples and request.slot is not None:
            masks.append(Mask(request.slot, request.grammar.mask))
        if samples and (wanted := request.sampling.num_top_logprobs) is not None:
            num_top_logprobs = max(num_top_logprobs, wanted)
        if request.num_unscored and request.num_computed_tokens < request.num_prompt_tokens - 1:
            num_prompt_logprobs = max(num_prompt_logprobs, request.sampling.num_prompt_logprobs or 0)
    return tuple(masks), num_top_logprobs, num_prompt_logprobs


def _images(
    ordered: list[Request], firsts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """Return rows, rotary positions and ends of keys of the step's tokens; None where no token has other ones than text."""
    if all(request.images is None for request in ordered):
        return None, None, None
    spans = list(zip([request.images or _TEXT for request in ordered], firsts.tolist(), counts.tolist(), strict=True))
    rows = np.concatenate([images.rows(first, count) for images, first, count in spans])
    rope = None
    if any(images.rope_positions is not None for images, _, _ in spans):
        rope = np.concatenate([images.rope(first, count) for images, first, count in spans], axis=1)
    ends = None
    if any(images.is_bidirectional for images, _, _ in spans):
        ends = np.concatenate([images.key_ends(first, count) for images, first, count in spans])
    return (rows if (rows != NO_IMAGE_ROW).any() else None), rope, ends


def token_places(plan: StepPlan, requests: Sequence[Request], num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the page table of each token of a step that was read, `[T, M]`, and the tokens' positions, `[K, T]`.

    requests: by row, without the step's new tokens. num_steps: K decode steps, or tokens of a speculative row. Positions of
    drafts that were wrong and of rows that are over follow the last token of the request; they will be computed again.
    """
    firsts = plan.num_computed_tokens
    if plan.draft_lengths is not None:  # the positions of the plan are the largest possible ones
        firsts = np.array([request.num_tokens - 1 for request in requests])
    counts = plan.num_scheduled_tokens
    rows = np.arange(len(counts)).repeat(counts)
    ahead = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
    return plan.block_tables[rows], firsts[rows] + ahead + np.arange(num_steps)[:, None]


def cut_chunk(states: Sequence[RecurrentStates], request: Request, count: int) -> int:
    """Return how many of `count` tokens a request computes, so that its chunk ends where its state can be kept."""
    num_known = request.num_tokens + request.num_unread_tokens
    own = states[request.table.rank]
    return own.cut(request.table.state, request.num_computed_tokens, count, num_known)


def _state_slots(
    states: Sequence[RecurrentStates], ordered: list[Request], ends: np.ndarray, num_known: np.ndarray, num_steps: int
) -> np.ndarray:
    """Return the slots of recurrent states that each row reads and writes.

    A call of several steps goes on after `ends`: it leaves no state that could be kept, not even after a prompt's last token.
    """
    rows = zip(ordered, ends.tolist(), num_known.tolist(), strict=True)
    slots = [
        states[request.table.rank].assign(
            request.table,
            end,
            is_chunk=num_steps == 1 and (end < known or end <= request.num_prompt_tokens),
        )
        for request, end, known in rows
    ]
    return np.array(slots, np.int32)


def _matrix(rows: list[np.ndarray]) -> np.ndarray:
    """Return `np.stack` of rows of one length, without its checks, which take a quarter of the time of packing."""
    return np.concatenate(rows).reshape(len(rows), -1)


def _adapters(ordered: list[Request]) -> np.ndarray | None:
    adapters = [request.adapter for request in ordered]
    return np.array(adapters, np.int32) if any(adapters) else None
