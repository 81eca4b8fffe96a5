"""Builds the outputs of a request from the results of a step."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from jaxserve.ipc.messages import ErrorInfo, RequestOutput, TokenLogprobs
from jaxserve.scheduler.plan import NO_TARGET, StepPlan, StepResult
from jaxserve.scheduler.request import Request


def output_of(
    request: Request,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    error: ErrorInfo | None = None,
) -> RequestOutput:
    """Return the new tokens of `request`, or log-probabilities of its prompt, or its end."""
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
