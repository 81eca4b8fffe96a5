"""Token counts of a reply."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    """Tokens that were computed for an earlier request."""


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    """Tokens of reasoning and of its markers."""
    accepted_prediction_tokens: int = 0
    """Tokens that were guessed ahead, from a prediction or from the request's own text, and are in the reply."""
    rejected_prediction_tokens: int = 0
    """Those that were wrong; they are in no other count."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    """Each prompt once, whatever `n` is."""
    completion_tokens: int
    """Of all choices together."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def make_usage(
    num_prompt: int,
    num_completion: int,
    num_cached: int,
    num_reasoning: int = 0,
    num_accepted: int = 0,
    num_rejected: int = 0,
) -> Usage:
    """Usage of a reply: the prompt counted once, completions of all choices summed, their reasoning among them."""
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens_details=CompletionTokensDetails(num_reasoning, num_accepted, num_rejected),
    )
