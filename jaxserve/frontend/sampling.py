"""The sampler's options as request fields, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec

from jaxserve.apis.schema.decode import invalid_field
from jaxserve.bounds import Bound
from jaxserve.errors import invalid
from jaxserve.frontend.checks import check_count, check_token_ids
from jaxserve.sampling.params import COLUMNS, SamplingParams
from jaxserve.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

_SEED_MODULUS = 2**31
_FIELD_TYPES: dict[str, Any] = get_type_hints(SamplingParams, include_extras=True)
_WIRE_TYPES: dict[str, Any] = {
    "allowed_token_ids": list[int],
    "bad_words": list[str],
    "logprob_token_ids": list[int],
}
"""Of fields that a request spells in another way than SamplingParams."""
_BOUNDS: dict[str, tuple[Bound, ...]] = {
    "seed": (Bound("value", -(2**63), 2**63 - 1),),
    "top_k": (Bound("value", -1, 2**31 - 1),),
    "logit_bias": (Bound("items", 0, "max_logit_bias"),),
    "bad_words": (Bound("items", 0, "max_bad_words"), Bound("characters", 1, "max_bad_word_chars")),
    "allowed_token_ids": (Bound("items", 1),),
    "logprob_token_ids": (Bound("items", 1, "max_top_logprobs"),),
    "stop_token_ids": (Bound("items", 0, "max_stop_token_ids"),),
}
"""Of requests, where they differ from those of SamplingParams or are settings."""


def _sampler_fields() -> list[tuple[str, Any, Any]]:
    """The device columns of SamplingParams as optional request fields without their ranges.

    The ranges are checked when the request becomes SamplingParams, where the error can name the value.
    """
    types = get_type_hints(SamplingParams) | _WIRE_TYPES
    return [(name, _bounded(name, types[name] | None), None) for name in COLUMNS]


def _bounded(name: str, kind: Any) -> Any:
    return Annotated[kind, *_BOUNDS[name]] if name in _BOUNDS else kind


if TYPE_CHECKING:

    class SamplerFields(msgspec.Struct, kw_only=True):
        seed: int | None = None
        logit_bias: dict[int, float] | None = None
        allowed_token_ids: list[int] | None = None
        bad_words: list[str] | None = None
        logprob_token_ids: list[int] | None = None
        stop_token_ids: list[int] | None = None
        ignore_eos: bool | None = None
else:
    _HOST_FIELDS = [
        ("stop_token_ids", _bounded("stop_token_ids", list[int] | None), None),
        ("ignore_eos", bool | None, None),
    ]
    SamplerFields = msgspec.defstruct(
        "SamplerFields", [*_sampler_fields(), *_HOST_FIELDS], kw_only=True, module=__name__
    )


def sampler_ranges() -> dict[str, dict[str, Any]]:
    """The ranges of SamplingParams that hold for requests as well, in JSON Schema."""
    names = [name for name in COLUMNS if name not in _BOUNDS]
    schemas, _ = msgspec.json.schema_components([_FIELD_TYPES[name] for name in names])
    words = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    return {
        name: {word: schema[word] for word in words if word in schema}
        for name, schema in zip(names, schemas, strict=True)
    }


def sampler_defaults() -> dict[str, Any]:
    """What numbers are where a request does not give them; a seed is drawn."""
    values = msgspec.structs.asdict(SamplingParams())
    return {name: values[name] for name in COLUMNS if isinstance(values[name], int | float) and name != "seed"}


def sampling_params(
    request: SamplerFields,
    defaults: Mapping[str, float],
    *,
    max_tokens: int,
    seed: int,
    num_top_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    vocab_size: int,
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    """The request's options, complete. Raises InvalidRequestError naming the field that is out of range.

    defaults: of the model, for what the request leaves out.
    bad_words: the request's, as token ids.
    """
    given = {name: value for name in COLUMNS if (value := getattr(request, name)) is not None}
    values: dict[str, Any] = {**defaults, **given}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    values |= {
        "seed": seed % _SEED_MODULUS,
        "allowed_token_ids": tuple(request.allowed_token_ids or ()),
        "bad_words": tuple(map(tuple, bad_words)),
        "logprob_token_ids": tuple(request.logprob_token_ids or ()),
        "max_tokens": max_tokens,
        "num_top_logprobs": num_top_logprobs,
        "num_prompt_logprobs": num_prompt_logprobs,
        "ignore_eos": bool(request.ignore_eos),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
    }
    _check_tokens(request, bad_words, vocab_size)
    for name, value in values.items():
        try:
            msgspec.convert(value, _FIELD_TYPES[name])
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise invalid_field(f"{reason} - at `$.{name}`", value=value) from None
    if values.get("min_tokens", 0) > max_tokens:
        raise invalid(
            "min_tokens",
            f"must not be more than the {max_tokens} tokens that may be generated, got {values['min_tokens']}",
        )
    return SamplingParams(**values)


def _check_tokens(request: SamplerFields, bad_words: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse too many tokens, and such that do not exist."""
    check_token_ids("stop_token_ids", request.stop_token_ids or [], vocab_size)
    check_token_ids("logit_bias", list(request.logit_bias or ()), vocab_size)
    for name in ("allowed_token_ids", "logprob_token_ids"):
        check_token_ids(name, getattr(request, name) or [], vocab_size)
    check_count("bad_words", len(bad_words), MAX_BAD_WORDS, "spellings of all words together")
    longest = max(map(len, bad_words), default=0)
    check_count("bad_words", longest, MAX_BAD_WORD_TOKENS, "tokens in a word")
