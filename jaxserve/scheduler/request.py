"""One request while the engine owns it."""

from __future__ import annotations

from itertools import cycle
from typing import Final, Protocol

import numpy as np

from jaxserve.ipc.messages import AddRequest, ErrorInfo, RequestOutput, TokenLogprobs
from jaxserve.kv.block_table import BlockTable
from jaxserve.kv.routed_experts import PageExperts, RequestExperts
from jaxserve.sampling.params import SlotInit, device_row, needs_state
from jaxserve.scheduler.fair_keys import Rank
from jaxserve.scheduler.images.request_images import RequestImages
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, NO_TARGET, UNREAD_TOKEN, StepPlan, StepResult
from jaxserve.scheduler.prompt_lookup import DraftState
from jaxserve.types import FinishReason, place_of

_SPARE_OUTPUT: Final = 128
"""Output tokens that fit before the token buffer grows."""


class GrammarState(Protocol):
    """The state of one request's grammar. All but `is_ready` is valid once it is ready."""

    @property
    def is_ready(self) -> bool: ...

    def take_jump_forward(self) -> list[int]:
        """Return the only tokens that may come next, before the one that the mask is for. Later calls return none."""
        ...

    @property
    def mask(self) -> np.ndarray:
        """The tokens that may come next, int32 `[W]`."""
        ...

    @property
    def is_terminated(self) -> bool:
        """True if no token may come next."""
        ...

    @property
    def error(self) -> str | None:
        """The reason why the grammar cannot be followed any further."""
        ...

    def advance(self, token: int) -> None:
        """Take the chosen token; returns at once."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, at most `seconds`."""
        ...


class Request:
    """Tokens, progress and pages of one request. Only its methods change its attributes.

        0 ........ num_prompt_tokens ........ num_tokens          known tokens: prompt, then output
                                              num_tokens ... + num_unread_tokens    sampled by steps in flight
        0 ........ num_computed_tokens                            their KV is in the pages of `table`, once
                                                                  the steps in flight are done

    It waits, runs (holds pages and a slot) or is finished. Preemption sets `num_computed_tokens` back
    to 0 and keeps the tokens.
    """

    __slots__ = (
        "_buffer",
        "_eos_token_ids",
        "adapter",
        "arrival_s",
        "draft",
        "finish_reason",
        "grammar",
        "images",
        "is_plain",
        "key_name",
        "length_limit",
        "needs_state",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "num_unread_tokens",
        "num_unscored",
        "queue_seconds",
        "rank",
        "request_id",
        "routed_experts",
        "sampling",
        "sampling_row",
        "slot",
        "stop_row",
        "stop_token_id",
        "stop_token_ids",
        "table",
    )

    def __init__(
        self,
        message: AddRequest,
        table: BlockTable,
        max_output_tokens: int,
        rank: Rank,
        arrival_s: float,
        eos_token_ids: frozenset[int],
        grammar: GrammarState | None,
        draft: DraftState,
        images: RequestImages | None = None,
    ) -> None:
        self.request_id = message.request_id
        self.adapter = place_of(message.adapter)
        self.sampling = message.sampling
        self.stop_token_ids = frozenset(message.sampling.stop_token_ids)
        self._eos_token_ids = eos_token_ids
        self.grammar = grammar
        """The state of the grammar that constrains the reply; the scheduler's policy advances it."""
        self.draft = draft
        """The state of speculation; the scheduler's policy changes it."""
        self.images = images
        """The images of the prompt; the scheduler's policy changes which rows are held."""
        self.sampling_row = device_row(message.sampling, is_masked=grammar is not None)
        self.needs_state = needs_state(message.sampling)
        self.stop_row = _stop_row(message, eos_token_ids)
        extras = (grammar, message.sampling.num_top_logprobs, message.sampling.num_prompt_logprobs)
        self.is_plain = all(extra is None for extra in extras)
        """True if the request has no grammar and wants no log-probabilities."""
        self.table = table
        self.rank = rank
        """Its turn; the scheduler's policy changes it until the request starts."""
        self.key_name = message.key_name
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.length_limit = self.num_prompt_tokens + max_output_tokens
        self.num_tokens = self.num_prompt_tokens
        self.num_unread_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when the request first started."""
        self.num_unscored = 0
        """Prompt tokens at its end whose log-probabilities were asked for and are not known. Such a request takes
        nothing from the prefix cache: tokens that are not computed have no log-probabilities."""
        self.routed_experts = RequestExperts() if message.returns_routed_experts else None
        """Progress of the experts that are sent; the scheduler's policy changes it. None if the request wants none."""
        self.arrival_s = arrival_s
        """Time of arrival on the scheduler's clock."""
        self.queue_seconds: float | None = None
        """Time from arrival to the first start; None until then."""
        self.num_preemptions = 0
        self.slot: int | None = None
        """Index into the device's per-request state while it runs."""
        self.num_in_flight = 0
        """Submitted steps that still write to its pages."""
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        """The entry of `stop_token_ids` that ended the request."""
        self._buffer = np.empty(self.num_tokens + min(max_output_tokens, _SPARE_OUTPUT), np.int32)
        self._buffer[: self.num_tokens] = message.prompt_token_ids
        self.forget_scores()

    @property
    def tokens(self) -> np.ndarray:
        """All known tokens; a view that is valid until the next `append`."""
        return self._buffer[: self.num_tokens]

    def next_tokens(self, count: int) -> np.ndarray:
        """Return the first `count` known tokens that are not computed; a view as `tokens`."""
        return self._buffer[self.num_computed_tokens : self.num_computed_tokens + count]

    def targets(self, count: int) -> np.ndarray:
        """Return the prompt token after each of the next `count`; NO_TARGET unless its log-probability is wanted."""
        targets = np.full(count, NO_TARGET, np.int32)
        first = self.num_prompt_tokens - self.num_unscored  # the first target that is missing
        positions = np.arange(self.num_computed_tokens, self.num_computed_tokens + count) + 1
        is_wanted = (positions >= first) & (positions < self.num_prompt_tokens)
        targets[is_wanted] = self.tokens[positions[is_wanted]]
        return targets

    def slot_init(self) -> SlotInit:
        """Return the initial sampler state of a request that got its slot. All its tokens must have been read."""
        if self.slot is None or self.num_unread_tokens:
            raise RuntimeError(f"{self.request_id} cannot initialise its slot now")
        stop_token_ids = self.stop_token_ids | self._eos_token_ids  # also with ignore_eos, as in vLLM
        has_prompt_ids = self.images is None or not self.images.is_given
        return SlotInit(
            self.slot, self.sampling, self.tokens.copy(), self.num_prompt_tokens, stop_token_ids, has_prompt_ids
        )

    def start(self, slot: int, num_cached_tokens: int, now_s: float) -> None:
        """Run from now on, in `slot`, with the first `num_cached_tokens` computed."""
        self.slot = slot
        self.num_computed_tokens = num_cached_tokens
        if self.queue_seconds is None:
            self.queue_seconds = now_s - self.arrival_s
            self.num_cached_tokens = num_cached_tokens

    def preempt(self) -> None:
        self.slot = None
        self.num_computed_tokens = 0
        self.num_unread_tokens = 0  # not zero only if the device has lost them
        self.draft.restart()
        self.num_preemptions += 1

    def begin_step(self, num_tokens: int, num_steps: int, *, is_sampling: bool) -> None:
        """Count one row of a step that is submitted: it computes `num_tokens`, then `num_steps - 1` of its own."""
        self.num_in_flight += 1
        self.num_computed_tokens += num_tokens + num_steps - 1
        if is_sampling:
            self.num_unread_tokens += num_steps

    def end_step(self) -> None:
        """Count one row of a step that is done: it writes to no page any more."""
        self.num_in_flight -= 1

    def land(self, num_sampled: int, num_valid: int) -> None:
        """Count the tokens that a step sampled as read. The KV of those that are not valid is computed again."""
        self.num_unread_tokens -= num_sampled
        self.num_computed_tokens -= num_sampled - num_valid

    def land_scores(self, count: int) -> None:
        """Count prompt tokens whose log-probabilities are known now."""
        self.num_unscored -= count

    def forget_scores(self) -> None:
        """Compute the log-probabilities of the whole prompt, again if there were some, unless an output token is known: the
        client has them then."""
        if self.num_tokens == self.num_prompt_tokens and self.sampling.num_prompt_logprobs is not None:
            self.num_unscored = self.num_prompt_tokens - 1

    def append(self, tokens: list[int]) -> list[int]:
        """Append output tokens up to and with the one that ends the request; returns those. Sets `finish_reason`."""
        for num_taken, token in enumerate(tokens, 1):
            if token == UNREAD_TOKEN:
                raise RuntimeError(f"the device ended {self.request_id}, which is not finished")
            if self.num_tokens == len(self._buffer):
                self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
            self._buffer[self.num_tokens] = token
            self.num_tokens += 1
            if self._is_ended_by(token):
                return tokens[:num_taken]
        return tokens

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    def _is_ended_by(self, token: int) -> bool:
        """Set `finish_reason` if `token`, the newest, ends the request.

        The device decides the same for up to MAX_STOP_TOKENS ids; this decision counts.
        """
        if token in self._eos_token_ids and not self.sampling.ignore_eos:
            self.finish_reason = "stop"
        elif token in self.stop_token_ids:
            self.finish_reason, self.stop_token_id = "stop", token
        elif self.num_tokens >= self.length_limit:
            self.finish_reason = "length"
        return self.finish_reason is not None


def _stop_row(message: AddRequest, eos_token_ids: frozenset[int]) -> np.ndarray:
    """Return the ids that end the request, as the device reads them: the first MAX_STOP_TOKENS."""
    ids = [] if message.sampling.ignore_eos else sorted(eos_token_ids)
    ids = [*ids, *message.sampling.stop_token_ids][:MAX_STOP_TOKENS]
    row = np.full(MAX_STOP_TOKENS, -1, np.int32)
    row[: len(ids)] = ids
    return row


def output_of(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    error: ErrorInfo | None = None,
    routed_experts: bytes | None = None,
) -> RequestOutput:
    """Return the new tokens of `request`, or log-probabilities or experts of its prompt, or its end."""
    return RequestOutput(
        request.request_id,
        token_ids,
        logprobs,
        request.finish_reason,
        request.stop_token_id,
        request.num_cached_tokens,
        error,
        request.queue_seconds,
        request.num_preemptions,
        prompt_logprobs,
        num_accepted_tokens=request.draft.num_accepted,
        num_rejected_tokens=request.draft.num_rejected,
        routed_experts=routed_experts,
    )


def logprobs_of(request: Request, result: StepResult, rows: slice, num_tokens: int) -> list[TokenLogprobs] | None:
    """Return log-probabilities of the first `num_tokens` tokens of these rows; None if the request wants none."""
    wanted = request.sampling.num_top_logprobs
    if wanted is None:
        return None
    chosen = result.logprobs[:, rows].ravel()[:num_tokens].tolist()  # several steps have one row
    # Alternatives come from single steps only, so they belong to the only token of their row.
    ids, values = result.top_token_ids[rows, :wanted].tolist(), result.top_logprobs[rows, :wanted].tolist()
    return [TokenLogprobs(*each) for each in zip(chosen, cycle(ids), cycle(values), strict=False)]


def routed_experts_of(request: Request, pages: PageExperts | None, num_computed: int) -> bytes | None:
    """Return the experts of the first `num_computed` tokens that were not sent; None if the request wants none."""
    if pages is None or request.routed_experts is None:
        return None
    return pages.take(request.routed_experts, request.table, num_computed)


def prompt_logprobs_of(request: Request, plan: StepPlan, result: StepResult, row: int) -> list[TokenLogprobs] | None:
    """Return log-probabilities of the row's targets; None if it has none."""
    wanted, scores = request.sampling.num_prompt_logprobs, result.prompt_scores
    if wanted is None or plan.targets is None or scores is None:
        return None
    first = int(plan.num_scheduled_tokens[:row].sum())
    targets = plan.targets[first : first + plan.num_scheduled_tokens[row]]
    places = first + np.flatnonzero(targets != NO_TARGET)
    if not len(places):
        return None
    columns = (
        scores.logprobs[places].tolist(),
        scores.top_token_ids[places, :wanted].tolist(),
        scores.top_logprobs[places, :wanted].tolist(),
        scores.ranks[places].tolist(),
    )
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]
