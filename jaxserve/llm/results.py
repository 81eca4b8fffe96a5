"""What the Python API returns, under the names that vLLM gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token in one place."""

    logprob: float
    rank: int | None
    """1: no token is more likely. None: it is not among the tokens that were asked for."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to be called."""

    id: str
    name: str
    arguments: str
    """JSON as the model wrote it: whether it is valid is the caller's to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str
    """Of `chat`: the content alone, without the reasoning and the calls that stand in the fields below."""
    token_ids: list[int]
    """All that were generated, with the one that ended the text."""
    finish_reason: str
    """ "stop", "length", or "tool_calls" as the server says it."""
    stop_reason: str | int | None
    """The stop string or the id of `stop_token_ids` that ended the text; None for EOS and all else."""
    cumulative_logprob: float | None
    """Sum over the tokens; None unless `logprobs` were asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """For each token: itself first, then the most likely ones."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuations."""

    prompt: str | None
    """As the model read it, templates and all; None when it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """As many as `n`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each token of the prompt but the first, of which there is nothing to say."""
    num_cached_tokens: int
    """Of the prompt, those that were not computed anew."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A text and its vector."""

    prompt: str | None
    """None when it was given as token ids."""
    prompt_token_ids: list[int]
    """With those that the model expects around a text."""
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How close two texts are."""

    score: float
    """The cosine of the angle between their vectors, -1 to 1; of a cross-encoder, what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput:
    """Two texts and how close they are."""

    prompt_token_ids: list[int]
    """Of both, one behind the other."""
    outputs: ScoringOutput
