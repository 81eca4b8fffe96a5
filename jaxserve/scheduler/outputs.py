"""What the clients of a request are told."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from jaxserve.ipc.messages import ErrorInfo, RequestOutput, TokenLogprobs
from jaxserve.scheduler.plan import NO_TARGET, UNREAD_TOKEN, StepPlan, StepResult
from jaxserve.scheduler.request import Request
from jaxserve.types import FinishReason


def append(
    request: Request, tokens: list[int], eos_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None, int | None]:
    """Give the request its new tokens, up to and with the one that ends it: those it took, and the verdict on the last."""
    for num_taken, token in enumerate(tokens, 1):
        if token == UNREAD_TOKEN:
            raise RuntimeError(f"the device ended {request.request_id}, which goes on")
        request.append(token)
        reason, stop_token_id = _verdict(request, token, eos_token_ids)
        if reason is not None:
            return tokens[:num_taken], reason, stop_token_id
    return tokens, None, None


def _verdict(request: Request, token: int, eos_token_ids: frozenset[int]) -> tuple[FinishReason | None, int | None]:
    """Whether `token`, the request's newest, ends it, and the stop token id that did.

    This is the truth. The device decides the same for itself, as far as MAX_STOP_TOKENS reaches.
    """
    if token in eos_token_ids and not request.sampling.ignore_eos:
        return "stop", None
    if token in request.stop_token_ids:
        return "stop", token
    if request.num_tokens >= request.length_limit:
        return "length", None
    return None, None


def news(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    reason: FinishReason | None,
    stop_token_id: int | None,
    prompt_logprobs: list[TokenLogprobs] | None,
) -> RequestOutput:
    """New tokens, perhaps the last ones, or log-probabilities of the prompt's."""
    return RequestOutput(
        request.request_id,
        token_ids,
        logprobs,
        reason,
        stop_token_id,
        request.num_cached_tokens,
        queue_seconds=request.queue_seconds,
        num_preemptions=request.num_preemptions,
        prompt_logprobs=prompt_logprobs,
        num_accepted_tokens=request.num_accepted_tokens,
        num_rejected_tokens=request.num_rejected_tokens,
    )


def ending(request: Request, reason: FinishReason, error: ErrorInfo | None) -> RequestOutput:
    """The end without a token."""
    return RequestOutput(
        request.request_id,
        [],
        finish_reason=reason,
        num_cached_tokens=request.num_cached_tokens,
        error=error,
        num_preemptions=request.num_preemptions,
        num_accepted_tokens=request.num_accepted_tokens,
        num_rejected_tokens=request.num_rejected_tokens,
    )


def logprobs_of(request: Request, result: StepResult, rows: slice, num_tokens: int) -> list[TokenLogprobs] | None:
    """Log-probabilities of the first `num_tokens` tokens, of one step each row or of a burst; None when nobody asked."""
    wanted = request.sampling.num_top_logprobs
    if wanted is None:
        return None
    chosen = result.logprobs[:, rows].ravel()[:num_tokens].tolist()  # of a burst there is one row, else one step
    # A step with alternatives is no burst, so they belong to the only token of their row.
    ids, values = result.top_token_ids[rows, :wanted].tolist(), result.top_logprobs[rows, :wanted].tolist()
    return [TokenLogprobs(*each) for each in zip(chosen, cycle(ids), cycle(values), strict=False)]


def prompt_logprobs_of(request: Request, plan: StepPlan, result: StepResult, row: int) -> list[TokenLogprobs] | None:
    """Those of the row's targets; None when it has none."""
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
