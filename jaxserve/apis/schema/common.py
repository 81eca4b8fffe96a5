"""Fields that several APIs take under the same names, and their translation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from jaxserve import __version__
from jaxserve.apis.openai.response_format import ResponseFormat
from jaxserve.bounds import Bound
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.choices.choice_stream import OutputDelta
from jaxserve.frontend.constraints import (
    NOTHING,
    Constraint,
    Kind,
    StructuredOutputs,
    only_constraint,
    structured_constraint,
)
from jaxserve.frontend.frontend import Frontend
from jaxserve.frontend.handle import RequestTiming
from jaxserve.frontend.routed_experts import npy_base64
from jaxserve.frontend.sampling import SamplerFields
from jaxserve.ipc.messages import ModelInfo
from jaxserve.types import LogprobsMode

MAX_SALT_CHARS: Final = 256
MAX_REQUEST_ID_CHARS: Final = 128
_CONSTRAINT_FIELDS: Final[Mapping[str, Kind]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields that hold a constraint of one kind each."""

ModelName = Annotated[str | None, Meta(description="A name from /v1/models. Default: the first one.")]
OwnId = Annotated[
    str | None,
    Bound("characters", 1, MAX_REQUEST_ID_CHARS),
    Meta(description="Id of the request, unless there is an X-Request-Id header."),
]
UnixTime = Annotated[int, Meta(description="Unix time in seconds.")]
Fingerprint = Annotated[str, Meta(description="Changes with weights, precision, mesh and versions.")]
Timing = Annotated[RequestTiming | msgspec.UnsetType, Meta(description="Only with `return_metrics`.")]
ReplyTokenIds = Annotated[list[int] | msgspec.UnsetType, Meta(description="Only with `return_token_ids`.")]
EXPERTS_FILE: Final = "A file of numpy's format (.npy) in base64: numbers of experts, `[tokens, layers with experts, top_k]`, uint8 or uint16."


class ModelQuery(msgspec.Struct):
    """The query of a route without a body that is about one model."""

    model: Annotated[
        str | None,
        Meta(
            description="A name from /v1/models. Default: the first one; commands need it if several models are served."
        ),
    ] = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: Annotated[bool | None, Meta(description="True: a final chunk has the usage and no choices.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="True: every chunk has the usage so far.")] = None
    include_obfuscation: Annotated[
        bool | None, Meta(description="Padding against traffic analysis; accepted without effect.")
    ] = None


class PromptLogprob(msgspec.Struct):
    """The log-probability of a token in its place in the prompt."""

    logprob: float
    rank: Annotated[int, Meta(description="Rank of the token; 1 is the most likely one.")]
    decoded_token: Annotated[str, Meta(description="Text of the token.")]


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | msgspec.UnsetType, Meta(description="Only if requested.")
]


class GenerationFields(SamplerFields, kw_only=True):
    """Fields of every endpoint that generates text. `None` means: not given."""

    model: ModelName = None
    stop: Annotated[
        str | list[str] | None,
        Bound("items", 0, "max_stop_strings"),
        Bound("characters", 1, "max_stop_chars"),
        Meta(description="Texts that end the reply, which does not contain them; the earliest match counts."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="True: the reply contains the stop string or token that ended it.")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, Meta(description="False: the text contains special tokens. Default: true.")
    ] = None
    stream: Annotated[
        bool | None, Meta(description="True: send the reply as server-sent events while it is generated.")
    ] = None
    priority: Annotated[
        int | None,
        Bound("value", -(2**31), 2**31 - 1),
        Meta(
            description="Requests with a lower number are served first. Default: 0, or the lowest number that the API key may use if that is higher."
        ),
    ] = None
    cache_salt: Annotated[
        str | None,
        Bound("characters", 1, MAX_SALT_CHARS),
        Meta(description="The prefix cache shares prompts only among requests with the same salt."),
    ] = None
    request_id: OwnId = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(
            description="Constrains the reply to a JSON schema, a regex, a choice or a grammar; not together with another `response_format`."
        ),
    ] = None
    guided_json: Annotated[
        dict[str, Any] | str | None, Meta(description="Older name of `structured_outputs.json`.")
    ] = None
    guided_regex: Annotated[str | None, Meta(description="Older name of `structured_outputs.regex`.")] = None
    guided_choice: Annotated[list[str] | None, Meta(description="Older name of `structured_outputs.choice`.")] = None
    guided_grammar: Annotated[str | None, Meta(description="Older name of `structured_outputs.grammar`.")] = None
    guided_decoding_backend: Annotated[str | None, Meta(description="Accepted without effect: there is one.")] = None
    json_schema: Annotated[
        dict[str, Any] | str | None, Meta(description="llama.cpp's and SGLang's name of `structured_outputs.json`.")
    ] = None
    regex: Annotated[str | None, Meta(description="SGLang's name of `structured_outputs.regex`.")] = None
    ebnf: Annotated[str | None, Meta(description="SGLang's name of `structured_outputs.grammar`.")] = None
    grammar: Annotated[str | None, Meta(description="llama.cpp's name of `structured_outputs.grammar`.")] = None
    logprobs_mode: Annotated[
        LogprobsMode | None,
        Meta(
            description="`raw_logprobs` or `processed_logprobs`: the mode that log-probabilities must have. It is the server's "
            "setting; a request for another mode is refused."
        ),
    ] = None
    return_metrics: Annotated[
        bool | None,
        Meta(description="True: the reply, or the last chunk of a stream, has the request's timings in `metrics`."),
    ] = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def constraint(
        self, formatted: Constraint | None = None, format_name: str = "response_format"
    ) -> Constraint | None:
        """Return the constraint that the request asks for, `formatted` being that of the field `format_name`.

        Raises InvalidRequestError for fields that ask for different ones.
        """
        named = {
            name: Constraint(kind, value, name)
            for name, kind in _CONSTRAINT_FIELDS.items()
            if (value := getattr(self, name)) not in NOTHING
        }
        if formatted is None and self.structured_outputs is None and not named:
            return None
        return only_constraint(
            {format_name: formatted, "structured_outputs": structured_constraint(self.structured_outputs), **named}
        )

    def reported(self, timing: RequestTiming) -> RequestTiming | msgspec.UnsetType:
        """Return the timing for the reply, if the request asks for it."""
        return timing if self.return_metrics else msgspec.UNSET


class CommonFields(GenerationFields, kw_only=True):
    """Fields of both completion endpoints."""

    max_tokens: Annotated[
        int | None, Bound("value", 0), Meta(description="Maximum number of tokens to generate. Default: 16.")
    ] = None
    n: Annotated[
        int | None,
        Bound("value", 1, "max_choices"),
        Meta(description="Number of replies to each prompt; they share its computation. Default: 1."),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Bound("value", 0, "max_top_logprobs"),
        Meta(
            description="Return log-probabilities of the prompt's tokens, and of this many most likely tokens at each position; not with `stream`."
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None,
        Meta(
            description="True: the reply has `prompt_token_ids`, and each choice the `token_ids` of its text, without those of a stop string that was cut off; `logprobs` has the same tokens."
        ),
    ] = None
    return_routed_experts: Annotated[
        bool | None,
        Meta(
            description="True: each choice has `routed_experts`, the experts that the tokens of its prompt and reply chose. Needs a model with experts and `--enable-return-routed-experts`."
        ),
    ] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Options of a stream; only with `stream`.")] = None
    response_format: Annotated[
        ResponseFormat | None, Meta(description="Constrains the reply to JSON or to a JSON schema.")
    ] = None

    def reported_ids(self, deltas: Sequence[OutputDelta]) -> list[int] | msgspec.UnsetType:
        """Return the token ids of one choice's deltas for the reply, if the request asks for them."""
        if not self.return_token_ids:
            return msgspec.UNSET
        return [token_id for delta in deltas for token_id in delta.token_ids]

    def reported_experts(self, last: OutputDelta) -> str | msgspec.UnsetType:
        """Return the experts of a choice from its last delta, as replies have them, if the request asks for them."""
        return msgspec.UNSET if last.routed_experts is None else npy_base64(last.routed_experts)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


def check_common(request: CommonFields) -> None:
    """Raise InvalidRequestError for options that need or exclude streaming."""
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("Stream options can only be defined when `stream=True`.", param="stream_options")


def shared_fields(request: GenerationFields) -> dict[str, Any]:
    """Return the arguments of a GenerationRequest that every API takes under the same names."""
    return {
        "model": request.model,
        "sampling": request,
        "stop": request.stop_strings,
        "include_stop": bool(request.include_stop_str_in_output),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "logprobs_mode": request.logprobs_mode,
    }


def heading(prefix: str, frontend: Frontend, model_info: ModelInfo, model: str | None) -> dict[str, Any]:
    """Return id (with `prefix`), time, model and fingerprint of a reply to a request for `model`."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": frontend.shown_name(model),
        # Changes when weights, precision, mesh or versions do.
        "system_fingerprint": f"jaxserve-{__version__}-{model_info.fingerprint}",
    }


def version_header(weight_version: int | None) -> dict[str, str]:
    """Return the header that names the version of the weights, if they have computed something."""
    return {} if weight_version is None else {"X-Weight-Version": str(weight_version)}
