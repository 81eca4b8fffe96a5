"""Results of the Python API, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None
    """Rank of the token; 1 is the most likely. None if it is not among the requested tokens."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the model."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it; the caller checks that it is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str
    """Generated text; from `chat` the content without reasoning and tool calls, which have their own fields."""
    token_ids: list[int]
    """All generated tokens, with the one that ended the text."""
    finish_reason: str
    """One of "stop", "length" and "tool_calls", as in the server's API."""
    stop_reason: str | int | None
    """The stop string or the id of `stop_token_ids` that ended the text; None for EOS and other ends."""
    cumulative_logprob: float | None
    """Sum over the tokens; None unless `logprobs` was set."""
    logprobs: list[dict[int, Logprob]] | None
    """One entry per token: the token first, then the most likely ones."""
    weight_versions: list[int]
    """The version of the weights that computed each token: 0, plus 1 for each `LLM.update_weights` before it."""
    routed_experts: np.ndarray | None = field(default=None, compare=False)
    """Experts of the tokens of prompt and continuation, `[tokens, layers with experts, top_k]`, uint8 or uint16, the best
    first; without those of the last token, which no step has computed. None unless `return_routed_experts` was set."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuations."""

    prompt: str | None
    """The prompt's text with its template; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The `n` continuations."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry per token of the prompt; None for the first, which has no log-probability."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A text and its vector."""

    prompt: str | None
    """The text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    """Token ids with the model's special tokens around the text."""
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A text's label, and how probable each one is."""

    label: str
    """Name of the most probable label."""
    probs: list[float]
    """Probability of each label, in the checkpoint's order."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationRequestOutput:
    """A text and its label."""

    prompt: str | None
    """The text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    """Token ids with the model's special tokens around the text."""
    outputs: ClassificationOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Similarity of two texts."""

    score: float
    """Cosine similarity of their vectors, -1 to 1; from a cross-encoder, its score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput:
    """Two texts and their similarity."""

    prompt_token_ids: list[int]
    """Token ids of both texts, one after the other."""
    outputs: ScoringOutput
