"""Fields and checks that chat and text completions share."""

from __future__ import annotations

import msgspec

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.server.schema import limits
from jaxserve.server.schema.checks import check_count, check_range, check_sizes
from jaxserve.server.schema.decode import shorten
from jaxserve.server.schema.sampling import SamplerFields
from jaxserve.server.schema.structured import ResponseFormat, StructuredOutputs
from jaxserve.types import MAX_TOP_LOGPROBS


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    """One more chunk at the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""
    include_obfuscation: bool | None = None
    """Padding against traffic analysis: a hint that we do not follow."""


class PromptLogprob(msgspec.Struct):
    """Of a token in its place in the prompt."""

    logprob: float
    rank: int
    """1: no token is more likely."""
    decoded_token: str
    """The token's text."""


class CommonFields(SamplerFields, kw_only=True):
    """What both completion endpoints take. `None` means: not given."""

    model: str | None = None
    """One of the names of /v1/models; the first of them if it is not given."""
    max_tokens: int | None = None
    """Most tokens to generate."""
    n: int | None = None
    """Replies to each prompt, which share its computation."""
    stop: str | list[str] | None = None
    """Texts before which a reply ends; the earliest match counts."""
    include_stop_str_in_output: bool | None = None
    """Whether the reply has the text or token that ended it."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, and of so many most likely ones in the place of each; not with `stream`."""
    stream: bool | None = None
    """Send the reply as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    priority: int | None = None
    """Requests with a lower number are served first."""
    cache_salt: str | None = None
    """Computed prompts are shared only with requests of the same salt."""
    request_id: str | None = None
    """The request's id, where no X-Request-Id header gives one."""
    response_format: ResponseFormat | None = None
    """Holds the reply to JSON, or to a JSON schema."""
    structured_outputs: StructuredOutputs | None = None
    """Holds the reply to a schema, a regex, a choice or a grammar; not with `response_format`."""

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Most likely tokens to tell for each of the prompt's; None where nobody asks for log-probabilities of these."""
        return self.prompt_logprobs

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


def check_common(request: CommonFields) -> None:
    """Check what needs neither model nor tokenizer. Raises InvalidRequestError naming field, value and limit."""
    check_range("n", request.n, 1, limits.MAX_CHOICES)
    check_range("priority", request.priority, -(2**31), 2**31 - 1)
    check_range("seed", request.seed, -(2**63), 2**63 - 1)
    check_range("prompt_logprobs", request.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("Stream options can only be defined when `stream=True`.", param="stream_options")
    _check_words(request)
    for name, text, limit in (
        ("cache_salt", request.cache_salt, limits.MAX_SALT_CHARS),
        ("request_id", request.request_id, limits.MAX_REQUEST_ID_CHARS),
    ):
        if text is not None and not 1 <= len(text) <= limit:
            raise InvalidRequestError(
                f"Invalid value for '{name}': must have 1 to {limit} characters, got {len(text)}.", param=name
            )


def check_listed_logprobs(request: CommonFields, wants_logprobs: bool) -> None:
    """Refuse a list of tokens in the place of the most likely ones where log-probabilities are not asked for."""
    if request.logprob_token_ids is not None and not wants_logprobs:
        raise InvalidRequestError(
            "When using `logprob_token_ids`, `logprobs` must be asked for.", param="logprob_token_ids"
        )


def _check_words(request: CommonFields) -> None:
    check_sizes("stop", request.stop_strings, limits.MAX_STOP_STRINGS, limits.MAX_STOP_CHARS)
    check_sizes("bad_words", request.bad_words or [], limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_CHARS)
    check_count("stop_token_ids", len(request.stop_token_ids or ()), limits.MAX_STOP_TOKEN_IDS, "ids")


def context_error(limit: int, num_prompt_tokens: str, param: str) -> ContextLengthError:
    """The prompt alone is too long. `num_prompt_tokens` may say "at least N"."""
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {num_prompt_tokens} "
        "input tokens, which leaves no room for output. Please reduce the length of the input prompt.",
        param=param,
    )


def resolve_max_tokens(asked: int | None, default: int | None, num_prompt: int, limit: int, param: str) -> int:
    """How many tokens may be generated; `default` None means: as many as fit.

    Raises ContextLengthError when prompt and output do not fit `limit` together.
    """
    room = limit - num_prompt
    if room < 1:
        raise context_error(limit, str(num_prompt), param)
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{shorten(num_prompt + asked)} tokens ({num_prompt} in the {param}, {shorten(asked)} in the completion). "
            f"Please reduce the length of the {param} or completion.",
            param=param,
        )
    return asked
