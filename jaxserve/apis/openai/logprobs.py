"""Log-probabilities in OpenAI's two formats, with the exact bytes of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from jaxserve.apis.openai.chat_schema import ChoiceLogprobs, ContentLogprob, TopLogprob
from jaxserve.apis.openai.completions_schema import CompletionLogprobs
from jaxserve.apis.schema.common import PromptLogprob
from jaxserve.ipc.messages import TokenLogprobs
from jaxserve.tokenizer.logprob_tokens import TextOffsets
from jaxserve.tokenizer.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with what the engine said of it."""

    token_id: int
    scores: TokenLogprobs | None
    """None for the first one of a prompt, of which there is nothing to say."""

    @property
    def logprob(self) -> float | None:
        return None if self.scores is None else clamp(self.scores.logprob)

    def alternatives(self, num_top: int) -> list[tuple[int, float]]:
        """The most likely tokens with their log-probabilities, most likely first."""
        if self.scores is None:
            return []
        pairs = zip(self.scores.top_token_ids, self.scores.top_logprobs, strict=True)
        return [(token_id, clamp(logprob)) for token_id, logprob in pairs][:num_top]


def prompt_tokens(token_ids: Sequence[int], scores: Sequence[TokenLogprobs]) -> list[ScoredToken]:
    """A prompt's tokens; `scores` begin with the second one."""
    return [ScoredToken(*pair) for pair in zip(token_ids, [None, *scores], strict=True)]


def clamp(logprob: float) -> float:
    """A finite log-probability."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int) -> ChoiceLogprobs:
    """The `logprobs` object of a chat choice."""

    def spell(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(tokenizer.token_text(token_id), logprob, list(tokenizer.token_bytes(token_id)))

    content = []
    for token in tokens:
        chosen = spell(token.token_id, token.logprob or 0.0)
        top = [spell(*alternative) for alternative in token.alternatives(num_top)]
        content.append(ContentLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChoiceLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int, offsets: TextOffsets
) -> CompletionLogprobs:
    """The `logprobs` object of the next tokens of a text choice; moves `offsets` on."""
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
        text_offset=offsets.push([token.token_id for token in tokens]),
    )


def prompt_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ScoredToken], num_top: int | None
) -> list[dict[str, PromptLogprob] | None] | msgspec.UnsetType:
    """The `prompt_logprobs` of a reply: by token id, the prompt's own token first, as vLLM spells them.

    num_top: None where nobody asked for them.
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
