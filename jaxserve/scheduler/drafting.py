"""Speculative decoding: drafts of the next tokens, checked by the step that would compute the next token anyway.

Each drafted token is one more row of a decode step, of the same request, one position further. What these rows sample is
accepted up to and with the first token that differs from the draft. A token depends only on its logits, the request's
seed and its position, so the text equals that of single steps, greedy or not.

There are no programs for it: rows are rows. A device that waits for its weights has time for them while few requests
run, and none for them while many do; so drafts are made while at most half of the rows are taken.

Rows of one request cannot share a recurrent state. Engines of models with such states have the speculative programs of draft
models instead (`Buckets.plans_have_drafts`): a row computes its newest token and its draft as one chunk, and the device writes the
state after the tokens that it accepts. Such a step costs more than one more row, so it is measured whether it pays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from jaxserve.ipc.messages import AddRequest
from jaxserve.ipc.stats import EngineStats
from jaxserve.kv.manager import KVManager
from jaxserve.sampling.params import needs_state
from jaxserve.scheduler.limits import StepLimits
from jaxserve.scheduler.plan import NO_SLOT, UNREAD_TOKEN, Buckets, StepPlan, StepResult
from jaxserve.scheduler.prompt_lookup import DraftState
from jaxserve.scheduler.request import Request
from jaxserve.scheduler.speculation import Payoff, count_draft, is_decoding

Drafts = Mapping[Request, np.ndarray]
"""Drafted tokens, which may follow a request's newest token."""


class Drafter:
    """The policy of speculation: which requests get drafts, and how long they are. It owns `Request.draft`."""

    def __init__(self, max_tokens: int, limits: StepLimits, kv: KVManager, buckets: Buckets) -> None:
        """max_tokens: of one draft, 0 for none at all; limits: of a step."""
        self._max_tokens = max_tokens
        self._has_model = buckets.num_drafts > 0 and not buckets.plans_have_drafts
        self._limits = limits
        self._kv = kv
        self._longest_chunk = buckets.num_drafts
        self._max_chunks = buckets.max_speculative_rows
        self._payoff = Payoff(buckets) if buckets.plans_have_drafts else None
        """Measures steps that verify drafts as chunks; None: drafts are rows."""

    @property
    def pays(self) -> bool:
        """True unless steps with drafts as chunks have been measured to be slower, or there are none."""
        return self._payoff is not None and self._max_tokens > 0 and self._payoff.pays

    def new_state(self, message: AddRequest) -> DraftState:
        """Return the state of a new request. Requests with a grammar or with sampler state get no drafts."""
        if message.grammar is not None or needs_state(message.sampling):
            return DraftState(0)
        return DraftState(self._max_tokens, message.prompt_token_ids, message.prediction_token_ids)

    def waits_for(self, running: Sequence[Request]) -> bool:
        """Return True if a request that could have a draft has an unread token."""
        return self._is_on(running) and any(
            request.draft.max_tokens and request.num_unread_tokens for request in running
        )

    def draft(self, running: Sequence[Request], counts: Sequence[int]) -> Drafts:
        """Return the drafts of a step in which every request computes at most one token; none for other steps.

        Their pages are allocated. A draft that gets none is dropped.
        """
        found: dict[Request, np.ndarray] = {}
        if not self._is_on(running) or max(counts) > 1:
            return found
        has_chunks = self._payoff is not None
        if has_chunks and not all(map(is_decoding, running)):
            return found
        num_free = self._longest_chunk if has_chunks else self._limits.max_rows - sum(counts)
        for request, count in zip(running, counts, strict=True):
            longest = min(request.draft.max_tokens, num_free, request.length_limit - request.num_tokens - 1)
            if not count or longest < 1 or request.num_computed_tokens + 1 < request.num_tokens:
                continue
            if has_chunks and not _may_have_chunk(request):
                continue
            draft = request.draft.draft(request.tokens, longest)
            if len(draft) and self._kv.extend(request.table, request.num_tokens + len(draft)):
                found[request] = draft
                num_free -= 0 if has_chunks else len(draft)
        return found

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that has been read what its tokens cost."""
        if self._payoff is not None:
            self._payoff.observe(plan, result, int((result.token_ids != UNREAD_TOKEN).sum()))

    def learn(self, request: Request, num_drafted: int, num_accepted: int, stats: EngineStats) -> None:
        """Learn from a draft that was verified."""
        request.draft.learn(num_accepted)
        count_draft(request, num_drafted, num_accepted, stats)

    def _is_on(self, running: Sequence[Request]) -> bool:
        max_running = self._limits.max_rows // 2 if self._payoff is None else self._max_chunks
        if self._max_tokens == 0 or self._has_model or not 0 < len(running) <= max_running:
            return False
        return self._payoff is None or self._payoff.choose(len(running)) == "speculate"


def _may_have_chunk(request: Request) -> bool:
    """Return True if a draft of the request may be verified as a chunk: without alternatives of tokens, and after its prompt, at
    whose end a snapshot of the state may be taken."""
    return not request.sampling.num_top_logprobs and request.num_tokens > request.num_prompt_tokens


def with_chunks(plan: StepPlan, requests: Sequence[Request], drafts: Drafts, buckets: Buckets) -> StepPlan:
    """Return a plan of one token of text per row as a speculative step, in which rows with a draft compute it as well."""
    tokens = np.zeros((len(requests), buckets.num_drafts), np.int32)
    lengths = np.zeros(len(requests), np.int32)
    for row, request in enumerate(requests):
        draft = drafts.get(request, ())
        lengths[row] = len(draft)
        tokens[row, : len(draft)] = draft
    return replace(
        plan,
        kind="speculate",
        bucket=buckets.pick("speculate", len(requests)),
        num_steps=1 + buckets.num_drafts,
        draft_lengths=lengths,
        drafted_tokens=tokens,
        is_position_unread=np.zeros(len(requests), np.bool_),
    )


def num_drafted(plan: StepPlan, row: int, num_rows: int) -> int:
    """Return the tokens that a plan drafts for the request of these rows: further rows, or a chunk."""
    if plan.drafted_tokens is None or plan.draft_lengths is None:
        return num_rows - 1
    return int(plan.draft_lengths[row])


def with_drafts(
    plan: StepPlan, requests: list[Request], drafts: Drafts, buckets: Buckets
) -> tuple[StepPlan, list[Request]]:
    """Return a plan of one token of text per row, and its requests by row, with the rows of the drafts added."""
    num_rows = np.array([1 + len(drafts.get(request, ())) for request in requests])
    row = np.arange(len(requests)).repeat(num_rows)
    ahead = np.arange(len(row)) - (num_rows.cumsum() - num_rows)[row]
    token_ids = plan.token_ids[row]
    token_ids[ahead > 0] = np.concatenate([drafts[request] for request in requests if request in drafts])
    plan = replace(
        plan,
        bucket=buckets.pick(plan.kind, len(row)),
        request_ids=tuple(plan.request_ids[i] for i in row),
        slots=np.where(ahead > 0, NO_SLOT, plan.slots[row]).astype(np.int32),
        num_scheduled_tokens=plan.num_scheduled_tokens[row],
        num_computed_tokens=plan.num_computed_tokens[row] + ahead.astype(np.int32),
        token_ids=token_ids,
        block_tables=plan.block_tables[row],
        is_sampling=plan.is_sampling[row],
        sampling=plan.sampling[row],
        length_limits=plan.length_limits[row],
        stop_token_ids=plan.stop_token_ids[row],
        targets=None if plan.targets is None else plan.targets[row],
        next_token_ids=None if plan.next_token_ids is None else plan.next_token_ids[row],
        adapters=None if plan.adapters is None else plan.adapters[row],
        rope_positions=None if plan.rope_positions is None else plan.rope_positions[:, row] + ahead.astype(np.int32),
        key_ends=None if plan.key_ends is None else plan.key_ends[row] + ahead.astype(np.int32),
    )
    return plan, [requests[i] for i in row]


def confirmed(plan: StepPlan, result: StepResult, row: int, num_rows: int) -> list[int]:
    """Return the tokens sampled by these rows of one request, up to and with the first that differs from the draft."""
    sampled: list[int] = result.token_ids[0, row : row + num_rows].tolist()
    draft = plan.token_ids[row + 1 : row + num_rows].tolist()  # rows of one token come first: row i has token i
    num_right = next((i for i, guess in enumerate(draft) if guess != sampled[i]), len(draft))
    return sampled[: num_right + 1]


def by_request(requests: Sequence[Request]) -> Iterator[tuple[Request, int, int]]:
    """Yield each request of a plan with its first row and the number of its rows, which are adjacent."""
    first = 0
    for _, group in groupby(requests, key=id):
        rows = list(group)
        yield rows[0], first, len(rows)
        first += len(rows)
