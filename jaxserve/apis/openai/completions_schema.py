"""`POST /v1/completions`: request, reply and chunk."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxserve.apis.schema.common import (
    EXPERTS_FILE,
    CommonFields,
    Fingerprint,
    PromptLogprobs,
    ReplyTokenIds,
    Timing,
    UnixTime,
    check_common,
)
from jaxserve.apis.schema.inputs import texts_or_ids
from jaxserve.apis.schema.usage import Usage
from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import invalid, unsupported
from jaxserve.frontend.checks import check_bound
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource, refuse_scores

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions."""


class CompletionRequest(CommonFields, kw_only=True):
    prompt: Annotated[
        str | list[Any] | None,
        Meta(description="A text, token ids, or a list of either. May be absent or empty beside `prompt_embeds`."),
    ] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        Meta(
            description="Embeddings of a prompt in place of tokens, or of several: files in base64, "
            "safetensors, .npy or torch.save's, of `[tokens, width]` float32, float16 or bfloat16. Their choices come before "
            "those of `prompt`. Needs `--enable-prompt-embeds`."
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        Bound("value", 0, "max_top_logprobs"),
        Meta(
            description="Return log-probabilities of the text's tokens, and of this many most likely tokens at each position."
        ),
    ] = None
    echo: Annotated[
        bool | None,
        Meta(
            description="True: the text, and `logprobs` if requested, begin with the prompt. Allows `max_tokens` 0, and then a prompt that fills the context."
        ),
    ] = None
    best_of: Annotated[int | None, Meta(description="Must equal `n`: the server does not choose among candidates.")] = (
        None
    )
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="False: a text prompt does not get the tokenizer's begin token. Default: true."),
    ] = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    @property
    def is_echo_only(self) -> bool:
        return bool(self.echo) and self.max_tokens == 0


def check_completion(request: CompletionRequest, limits: LimitsConfig) -> list[str | list[int] | EmbedsSource]:
    """Return the prompts. Raises InvalidRequestError for what no model could be given; token ids are checked later."""
    check_common(request)
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "must be at least 1 (0 only with `echo`), got 0")
    if request.best_of is not None and request.best_of != request.num_choices:
        raise unsupported("best_of", f"must equal `n` ({request.num_choices}), got {request.best_of}")
    embeds = _embeds_sources(request.prompt_embeds)
    if request.echo:
        refuse_scores("echo", embeds)
    prompts = [*embeds, *(texts_or_ids("prompt", request.prompt) if request.prompt or not embeds else ())]
    check_bound(Bound("items", 1, "max_prompts"), "prompt_embeds" if embeds else "prompt", prompts, limits)
    return prompts


def _embeds_sources(given: str | list[str] | None) -> list[EmbedsSource]:
    if isinstance(given, str):
        return [EmbedsSource(given, "prompt_embeds")] if given else []
    return [EmbedsSource(content, f"prompt_embeds[{i}]") for i, content in enumerate(given or ())]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: Annotated[list[int], Meta(description="Offset of each token's text, in characters.")]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Annotated[str | None, Meta(description="`stop` or `length`; null before the end of a stream.")]
    stop_reason: Annotated[
        str | int | None, Meta(description="The stop string or token id that ended the text; null for its natural end.")
    ] = None
    prompt_logprobs: PromptLogprobs = msgspec.UNSET
    prompt_token_ids: Annotated[
        list[int] | msgspec.UnsetType,
        Meta(description="Only with `return_token_ids`; in a stream in the first chunk of each choice."),
    ] = msgspec.UNSET
    token_ids: ReplyTokenIds = msgspec.UNSET
    routed_experts: Annotated[
        str | msgspec.UnsetType,
        Meta(
            description=f"Only with `return_routed_experts`; in a stream in the last chunk of each choice. {EXPERTS_FILE}"
        ),
    ] = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Reply and chunk alike: OpenAI gives both the object `text_completion`."""

    id: str
    object: str = "text_completion"
    created: UnixTime
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: Fingerprint
    usage: Annotated[
        Usage | msgspec.UnsetType | None,
        Meta(description="In chunks of a stream only with `include_usage`."),
    ] = msgspec.UNSET
    metrics: Timing = msgspec.UNSET
