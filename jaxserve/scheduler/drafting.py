"""Tokens guessed ahead: what followed the newest tokens of a request where they stood before, may follow again.

Texts repeat what they are about: code under revision, a summary, an answer from documents; and sometimes a client has a
prediction. A draft (prompt lookup,
https://github.com/apoorvumang/prompt-lookup-decoding) costs no model. It is checked by the step that would compute the
next token anyway: each guess is one more row of a decode step, of the same request, one position further, and what these
rows sample is taken as far as the guesses before it were right. As a token is sampled from its logits, the request's
seed and its position alone, the text is the one that single steps would give, sampled or not.

There are no programs for it: rows are rows. On a device that waits for its weights they cost next to nothing while few
requests run, and with many there is no room for them; so drafts are made while at most half of the rows are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

import numpy as np

from jaxserve.kv.block_table import BlockTable
from jaxserve.scheduler.plan import NO_SLOT, Buckets, StepPlan, StepResult
from jaxserve.scheduler.request import Request

MIN_MATCH: Final = 2
"""Newest tokens that must have stood together before, unless drafts were wrong."""
MAX_MATCH: Final = 16
"""Among the places where they did, those are best that agree longest; more than so many say no more."""

Drafts = Mapping[Request, np.ndarray]
"""The tokens that may come behind the newest one."""


def continuation(tokens: np.ndarray, count: int, shortest: int = MIN_MATCH) -> np.ndarray:
    """Up to `count` tokens: what followed the end of `tokens` where it stood before; the latest of the best places.

    A repetition that reaches the end is thought to go on; a negative number ends what can follow. Nothing where the last
    `shortest` tokens are new together.
    """
    end = len(tokens) - 1
    places = np.flatnonzero(tokens[MIN_MATCH - 1 : end] == tokens[end]) + MIN_MATCH - 1
    for back in range(1, MAX_MATCH):
        agreeing = places[places >= back]
        agreeing = agreeing[tokens[agreeing - back] == tokens[end - back]]
        if not len(agreeing):
            if back < shortest:
                return tokens[:0]
            break
        places = agreeing
    if not len(places):
        return tokens[:0]
    last = int(places[-1])
    draft = tokens[last + 1 + np.arange(count) % (end - last)]
    borders = np.flatnonzero(draft < 0)
    return draft[: borders[0]] if len(borders) else draft


def with_drafts(
    plan: StepPlan, requests: list[Request], drafts: Drafts, buckets: Buckets
) -> tuple[StepPlan, list[Request]]:
    """A plan of one token for each row, and its requests by row, with the rows of the drafts as well."""
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
        adapters=None if plan.adapters is None else plan.adapters[row],
    )
    return plan, [requests[i] for i in row]


def confirmed(plan: StepPlan, result: StepResult, row: int, num_rows: int) -> list[int]:
    """What these rows of one request sampled, as far as they stand behind the right tokens."""
    sampled: list[int] = result.token_ids[0, row : row + num_rows].tolist()
    draft = plan.token_ids[row + 1 : row + num_rows].tolist()  # rows of one token come first: row i has token i
    num_right = next((i for i, guess in enumerate(draft) if guess != sampled[i]), len(draft))
    return sampled[: num_right + 1]


def by_request(requests: Sequence[Request]) -> Iterator[tuple[Request, int, int]]:
    """Each request of a plan with its first row and the number of its rows, which stand together."""
    first = 0
    for _, group in groupby(requests, key=id):
        rows = list(group)
        yield rows[0], first, len(rows)
        first += len(rows)


class Drafter:
    """Who gets drafts, and of what length."""

    def __init__(self, max_tokens: int, max_rows: int) -> None:
        """max_tokens: of one draft, 0 for none at all; max_rows: of a step."""
        self._max_tokens = max_tokens
        self._max_rows = max_rows

    def admit(self, request: Request) -> None:
        """Say whether a new request may have drafts.

        Not with a grammar, which has its own; nor where the device keeps account of what is sampled.
        """
        if request.grammar is None and not request.needs_state:
            request.max_draft_tokens, request.shortest_match = self._max_tokens, MIN_MATCH

    def waits_for(self, running: Sequence[Request]) -> bool:
        """Whether a request that could have a draft has a newest token that nobody has read."""
        return self._is_in_turn(running) and any(
            request.max_draft_tokens and request.num_unread_tokens for request in running
        )

    def draft(
        self, running: Sequence[Request], counts: Sequence[int], extend: Callable[[BlockTable, int], bool]
    ) -> Drafts:
        """What is guessed in a step that gives one new token to everybody; nothing in others.

        extend: makes a table hold so many tokens, or says no.
        """
        found: dict[Request, np.ndarray] = {}
        if not self._is_in_turn(running) or max(counts) > 1:
            return found
        room = self._max_rows - sum(counts)
        for request, count in zip(running, counts, strict=True):
            longest = min(request.max_draft_tokens, room, request.length_limit - request.num_tokens - 1)
            if not count or longest < 1 or request.num_computed_tokens + 1 < request.num_tokens:
                continue
            draft = continuation(request.tokens_to_learn_from, longest, request.shortest_match)
            if len(draft) and extend(request.table, request.num_tokens + len(draft)):
                found[request] = draft
                room -= len(draft)
        return found

    def learn(self, request: Request, num_right: int, num_wrong: int) -> None:
        """The next draft is twice as long as what was right of this one, and one token more. Where nothing was, twice as
        many tokens must have stood together before: texts that only look alike are soon left alone."""
        request.num_accepted_tokens += num_right
        request.num_rejected_tokens += num_wrong
        request.max_draft_tokens = min(2 * num_right + 1, self._max_tokens)
        request.shortest_match = MIN_MATCH if num_right else min(2 * request.shortest_match, MAX_MATCH)

    def _is_in_turn(self, running: Sequence[Request]) -> bool:
        return self._max_tokens > 0 and 0 < 2 * len(running) <= self._max_rows
