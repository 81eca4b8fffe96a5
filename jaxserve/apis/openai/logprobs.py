"""Log-probabilities in OpenAI's two formats, with the exact bytes of each token, and those of prompts as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from jaxserve.apis.openai.chat_schema import ChoiceLogprobs, ContentLogprob, TopLogprob
from jaxserve.apis.openai.completions_schema import CompletionLogprobs
from jaxserve.apis.schema.common import PromptLogprob
from jaxserve.frontend.choices.content_tokens import ScoredToken
from jaxserve.tokenizer.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int) -> ChoiceLogprobs:
    """Return the `logprobs` object of a chat choice."""

    def scored(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(tokenizer.token_text(token_id), logprob, list(tokenizer.token_bytes(token_id)))

    content = []
    for token in tokens:
        chosen = scored(token.token_id, token.logprob or 0.0)
        top = [scored(*alternative) for alternative in token.alternatives(num_top)]
        content.append(ContentLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChoiceLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, offsets: list[int]
) -> CompletionLogprobs:
    """Return the `logprobs` object of tokens of a text choice that begin at `offsets`."""
    tops: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprob is None:
            tops.append(None)
            continue
        top = {tokenizer.token_text(token.token_id): token.logprob}
        for token_id, logprob in token.alternatives(num_top):
            top.setdefault(tokenizer.token_text(token_id), logprob)
        tops.append(top)
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token.token_id) for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        top_logprobs=tops if num_top else None,
        text_offset=offsets,
    )


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[ScoredToken], num_top: int | None
) -> list[dict[str, PromptLogprob] | None] | msgspec.UnsetType:
    """Return the `prompt_logprobs` of a reply: by token id, the prompt's own token first.

    num_top: None if they were not requested.
    """
    if num_top is None:
        return msgspec.UNSET
    entries: list[dict[str, PromptLogprob] | None] = []
    for token in tokens:
        if token.scores is None or token.logprob is None:
            entries.append(None)
            continue
        own = PromptLogprob(token.logprob, token.scores.rank or 0, tokenizer.token_text(token.token_id))
        entry = {str(token.token_id): own}
        for rank, (token_id, logprob) in enumerate(token.alternatives(num_top), start=1):
            entry.setdefault(str(token_id), PromptLogprob(logprob, rank, tokenizer.token_text(token_id)))
        entries.append(entry)
    return entries
