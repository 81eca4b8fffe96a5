"""Rows to arrays: the only place that tells decode from mixed."""

from __future__ import annotations

import numpy as np

from jaxserve.scheduler.plan import UNREAD_TOKEN, Buckets, Mask, StepPlan
from jaxserve.scheduler.request import Request
from jaxserve.types import NO_LOGPROBS, ProgramKind


def share_budget(running: list[Request], max_tokens: int) -> list[int]:
    """Tokens of the next step for each running request, in order.

    Nothing for a request that ends by its length with a token under way, or whose grammar is not ready.
    """
    spare = max_tokens - len(running)
    counts = []
    for request in running:
        length = request.num_tokens + request.num_unread_tokens
        is_next = length < request.length_limit and (request.grammar is None or request.is_ready)
        count = min(length - request.num_computed_tokens, 1 + spare) if is_next else 0
        spare -= count - 1
        counts.append(count)
    return counts


def pack(
    requests: list[Request], counts: list[int], buckets: Buckets, num_steps: int, newcomers: list[Request]
) -> tuple[StepPlan, list[Request]]:
    """The plan in which request i computes its next `counts[i]` tokens, and the requests in row order.

    Requests with a count of 0 have no row. The arrays are copies: what happens to the requests later does
    not reach a plan under way. newcomers: those that have just got their slots.
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
    token_ids = np.full(int(num_scheduled.sum()), UNREAD_TOKEN, np.int32)
    num_top_logprobs = num_prompt_logprobs = NO_LOGPROBS
    masks: list[Mask] = []
    start = 0
    for row, request in enumerate(ordered):
        count = counts[rows[row]]
        if not request.num_unread_tokens:
            token_ids[start : start + count] = request.next_tokens(count)
        start += count
        if request.is_plain:
            continue
        if request.grammar is not None and is_sampling[row] and request.slot is not None:
            masks.append(Mask(request.slot, request.grammar.mask))
        if is_sampling[row] and (wanted := request.sampling.num_top_logprobs) is not None:
            num_top_logprobs = max(num_top_logprobs, wanted)
        if request.num_unscored and request.is_scoring:
            num_prompt_logprobs = max(num_prompt_logprobs, request.sampling.num_prompt_logprobs or 0)

    targets = _targets(ordered, num_scheduled) if num_prompt_logprobs > NO_LOGPROBS else None
    kind: ProgramKind = "decode" if num_single == num_rows and targets is None else "mixed"
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
        slot_inits=tuple(request.slot_init() for request in newcomers if request.needs_state),
        adapters=_adapters(ordered),
        masks=tuple(masks),
    )
    return plan, ordered


def _matrix(rows: list[np.ndarray]) -> np.ndarray:
    """`np.stack` for rows of one length, without its checks: they would take a quarter of the time of all packing."""
    return np.concatenate(rows).reshape(len(rows), -1)


def _adapters(ordered: list[Request]) -> np.ndarray | None:
    adapters = [request.adapter for request in ordered]
    return np.array(adapters, np.int32) if any(adapters) else None


def _targets(ordered: list[Request], num_scheduled: np.ndarray) -> np.ndarray:
    """The tokens that the scheduled ones are scored by: (T,)."""
    return np.concatenate([request.targets(count) for request, count in zip(ordered, num_scheduled, strict=True)])
