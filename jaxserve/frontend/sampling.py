"""The sampler's options as request fields, their translation into the engine's sampling parameters, and seeds."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta

from jaxserve.bounds import Bound
from jaxserve.errors import invalid
from jaxserve.frontend.checks import check_count, check_token_ids, invalid_field
from jaxserve.sampling.params import (
    COLUMNS,
    DEFAULTS,
    OPTIONS,
    EngineSamplingParams,
    TokenIds,
    option_meta,
    option_type,
    plain_type,
)
from jaxserve.types import MAX_BAD_WORD_TOKENS

_SEED_MODULUS = 2**31
_TYPES: Final = {name: option_type(name, TokenIds) for name in OPTIONS}
_MAX_LENGTHS: Final = {name: option_meta(name).max_length for name in OPTIONS}
_SCHEMA_WORDS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}


def _request_field(name: str) -> tuple[str, Any, None]:
    """Return an option as an optional request field. Its range is only described.

    The range is checked when the request becomes EngineSamplingParams, where the error can name the value.
    """
    meta, bounds = (
        option_meta(name),
        [extra for extra in option_type(name, str).__metadata__ if isinstance(extra, Bound)],
    )
    text, default = meta.description or "", DEFAULTS[name]
    if name in COLUMNS and isinstance(default, int | float):
        better = " or what the model recommends" if OPTIONS[name].is_recommended else ""
        text = f"{text} Default: {default}{better}."
    ranges = {} if bounds else {word: getattr(meta, limit) for word, limit in _SCHEMA_WORDS.items()}
    shown = Meta(
        description=text, extra_json_schema={word: limit for word, limit in ranges.items() if limit is not None}
    )
    return name, Annotated[plain_type(name, str) | None, shown, *bounds], None


if TYPE_CHECKING:

    class SamplerFields(msgspec.Struct, kw_only=True):
        seed: int | None = None
        logprob_token_ids: Sequence[int] | None = None
else:
    SamplerFields = msgspec.defstruct("SamplerFields", map(_request_field, OPTIONS), kw_only=True, module=__name__)


def sampling_params(
    request: SamplerFields,
    defaults: Mapping[str, float],
    *,
    max_tokens: int,
    seed: int,
    num_top_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    vocab_size: int,
    words: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> EngineSamplingParams:
    """Return the request's options, complete. Raises InvalidRequestError naming the field that is out of range.

    defaults: those of the model, for options that the request leaves out.
    words: the token ids of options that hold words, as `Tokenization.encode_words` returns them.
    """
    values: dict[str, Any] = {**defaults, **(words or {})}
    for name, option in OPTIONS.items():
        value = getattr(request, name)
        if value is not None and option.holds != "words":
            values[name] = DEFAULTS[name] if value == option.alias else value
    _check_tokens(values, vocab_size)
    values["seed"] = seed % _SEED_MODULUS
    for name, value in values.items():
        try:
            msgspec.convert(value, _TYPES[name])
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise invalid_field(f"{reason} - at `$.{name}`", value=value) from None
    if values.get("min_tokens", 0) > max_tokens:
        raise invalid(
            "min_tokens",
            f"must not be more than the {max_tokens} tokens that may be generated, got {values['min_tokens']}",
        )
    return EngineSamplingParams(
        max_tokens=max_tokens, num_top_logprobs=num_top_logprobs, num_prompt_logprobs=num_prompt_logprobs, **values
    )


def _check_tokens(values: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, and words of too many tokens."""
    for name, option in OPTIONS.items():
        if option.holds == "token_ids":
            check_token_ids(name, list(values.get(name, ())), vocab_size)
        elif option.holds == "words":
            words = values.get(name, ())
            check_count(name, len(words), _MAX_LENGTHS[name] or len(words), "spellings of all words together")
            check_count(name, max(map(len, words), default=0), MAX_BAD_WORD_TOKENS, "tokens in a word")


def _hash(label: bytes, *numbers: int) -> int:
    text = b":".join([label, *(b"%d" % number for number in numbers)])
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & (_SEED_MODULUS - 1)


def child_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request with n > 1; choice 0 keeps the request's own."""
    return seed if index == 0 else _hash(b"child", seed, index)


class SeedStream:
    """Seeds for requests that bring none: the k-th draw depends on the server's seed and k alone.

    Of `stride` API processes, each draws every `stride`-th from its own `start` on, so that no two requests
    share a seed.
    """

    def __init__(self, seed: int, start: int = 0, stride: int = 1) -> None:
        self._seed = seed
        self._counter = itertools.count(start, stride)

    def draw(self) -> int:
        return _hash(b"request", self._seed, next(self._counter))
