"""Fields and checks that chat and text completions share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec

from jaxserve.errors import ContextLengthError, InvalidRequestError
from jaxserve.sampling.params import COLUMNS, SamplingParams
from jaxserve.server.schema import limits
from jaxserve.server.schema.decode import invalid_field, shorten

_SEED_MODULUS = 2**31


def _sampler_fields() -> list[tuple[str, Any, Any]]:
    """The device columns of SamplingParams as optional request fields without their ranges.

    The ranges are checked when the request becomes SamplingParams, where the error can name the value.
    """
    hints = get_type_hints(SamplingParams)
    return [(name, (get_args(hints[name]) or (hints[name],))[0] | None, None) for name in COLUMNS]


if TYPE_CHECKING:

    class SamplerFields(msgspec.Struct, kw_only=True):
        seed: int | None = None
else:
    SamplerFields = msgspec.defstruct("SamplerFields", _sampler_fields(), kw_only=True, module=__name__)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Padding against traffic analysis: a hint that we do not follow."""


class CommonFields(SamplerFields, kw_only=True):
    """What both completion endpoints take. `None` means: not given."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

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


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    """Refuse a value outside `low..high`."""
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(
            f"Invalid value for '{name}': must be between {low} and {high}, got {shorten(value)}.", param=name
        )


def check_common(request: CommonFields) -> None:
    """Check what needs neither model nor tokenizer. Raises InvalidRequestError naming field, value and limit."""
    check_range("n", request.n, 1, limits.MAX_CHOICES)
    check_range("priority", request.priority, -(2**31), 2**31 - 1)
    check_range("seed", request.seed, -(2**63), 2**63 - 1)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("Stream options can only be defined when `stream=True`.", param="stream_options")
    _check_stops(request)
    for name, text, limit in (
        ("cache_salt", request.cache_salt, limits.MAX_SALT_CHARS),
        ("request_id", request.request_id, limits.MAX_REQUEST_ID_CHARS),
    ):
        if text is not None and not 1 <= len(text) <= limit:
            raise InvalidRequestError(
                f"Invalid value for '{name}': must have 1 to {limit} characters, got {len(text)}.", param=name
            )


def _check_stops(request: CommonFields) -> None:
    stops = request.stop_strings
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"Invalid value for 'stop': at most {limits.MAX_STOP_STRINGS} strings, got {len(stops)}.", param="stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= limits.MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"Invalid value for 'stop': each string must have 1 to {limits.MAX_STOP_CHARS} characters, "
                f"got {len(stop)}.",
                param="stop",
            )
    num_ids = len(request.stop_token_ids or ())
    if num_ids > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"Invalid value for 'stop_token_ids': at most {limits.MAX_STOP_TOKEN_IDS} ids, got {num_ids}.",
            param="stop_token_ids",
        )


def check_token_ids(name: str, token_ids: list[Any], vocab_size: int) -> None:
    """Refuse anything but integers in [0, vocab_size)."""
    if not token_ids:
        return
    if set(map(type, token_ids)) != {int}:
        raise InvalidRequestError(f"Invalid value for '{name}': token ids must be integers.", param=name)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequestError(
            f"Invalid value for '{name}': token id {shorten(low if low < 0 else high)} is outside the vocabulary "
            f"(0 to {vocab_size - 1}).",
            param=name,
        )


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


def sampling_params(
    request: CommonFields, *, max_tokens: int, seed: int, num_top_logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """The request's options, complete. Raises InvalidRequestError naming the field that is out of range."""
    stop_token_ids = request.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_token_ids, vocab_size)
    values: dict[str, Any] = {name: value for name in COLUMNS if (value := getattr(request, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    values |= {
        "seed": seed % _SEED_MODULUS,
        "max_tokens": max_tokens,
        "num_top_logprobs": num_top_logprobs,
        "ignore_eos": bool(request.ignore_eos),
        "stop_token_ids": tuple(stop_token_ids),
    }
    for name, value in values.items():
        try:
            msgspec.convert(value, _FIELD_TYPES[name])
        except msgspec.ValidationError as error:
            raise invalid_field(f"{error} - at `$.{name}`", value=value) from None
    return SamplingParams(**values)


_FIELD_TYPES: dict[str, Any] = get_type_hints(SamplingParams, include_extras=True)
