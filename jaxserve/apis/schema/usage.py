"""Token counts of a reply."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.frontend.handle import TokenCounts


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: Annotated[int, Meta(description="Tokens from the prefix cache.")] = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: Annotated[int, Meta(description="Tokens of reasoning and of its markers.")] = 0
    accepted_prediction_tokens: Annotated[
        int,
        Meta(description="Draft tokens, from a prediction or from the request's text, that are in the reply."),
    ] = 0
    rejected_prediction_tokens: Annotated[
        int, Meta(description="Draft tokens that were wrong; not counted elsewhere.")
    ] = 0


class Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, Meta(description="Tokens of each prompt, counted once for any `n`.")]
    completion_tokens: Annotated[int, Meta(description="Tokens of all choices.")]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(counts: TokenCounts) -> Usage:
    """Return the counts as OpenAI reports them."""
    return Usage(
        prompt_tokens=counts.num_prompt,
        completion_tokens=counts.num_completion,
        total_tokens=counts.num_prompt + counts.num_completion,
        prompt_tokens_details=PromptTokensDetails(counts.num_cached),
        completion_tokens_details=CompletionTokensDetails(
            counts.num_reasoning, counts.num_accepted, counts.num_rejected
        ),
    )
