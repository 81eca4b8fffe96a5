"""Sampling parameters: the table of all options of the sampler, and what derives from it. No jax.

`SamplerOptions` is the table. A field declares one option: its type, its default (the value that changes nothing), its
range, its text and the stage of the sampler that applies it. From the table derive

- `llm.sampling_params.SamplingParams`, the class of the Python API: it inherits the fields
- `EngineSamplingParams`, the struct in the messages to the engine: it inherits them as well
- the request fields of the HTTP API, each of them optional, and their texts and bounds in /openapi.json and docs/api.md
- the row of int32 words that travels to the device with every step: `device_row`
- the table of options in docs/sampling.md

The device half of an option is the function of the same name in the module of its stage, `sampling/<stage>.py`. Within
a stage, options apply in the order of their fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, get_args, get_type_hints

import numpy as np
from msgspec import Meta

from jaxserve.bounds import Bound
from jaxserve.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS

Stage = Literal["biases", "penalties", "masks", "scaling", "cuts", "draw", "logprobs"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""The stages of the sampler in their order. Each is a module of this package."""
Word = TypeVar("Word")
"""A text in a request, and its token ids in the engine."""
TokenIds = Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]


@dataclass(frozen=True, slots=True)
class Option:
    """Properties of an option besides its type, its range and its text."""

    stage: Stage | None = None
    """The stage that applies it on the device; None: the host decides it."""
    keeps_state: bool = False
    """True if the device keeps state for a request with another value than the default."""
    holds: Literal["numbers", "token_ids", "words"] = "numbers"
    """`words` are texts in a request, and are encoded before they go to the engine."""
    alias: int | None = None
    """Another value for the default, as -1 of `top_k`; it is replaced before the request goes to the engine."""
    is_recommended: bool = False
    """True if a checkpoint's generation_config.json may have a better default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOptions(Generic[Word]):
    """The options that a request may set, with the defaults that change nothing."""

    logit_bias: Annotated[
        Annotated[Mapping[int, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=MAX_LOGIT_BIAS)] | None,
        Meta(description="Added to the logits of these tokens, -100 to 100."),
        Bound("items", 0, "max_logit_bias"),
        Option("biases", keeps_state=True, holds="token_ids"),
    ] = None
    bad_words: Annotated[
        Sequence[Word],
        Meta(
            max_length=MAX_BAD_WORDS,
            description="Words that are never completed, at the start of a text or after a space. The end of the "
            "prompt is not part of a word.",
        ),
        Bound("items", 0, "max_bad_words"),
        Bound("characters", 1, "max_bad_word_chars"),
        Option("biases", keeps_state=True, holds="words"),
    ] = ()
    repetition_penalty: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100.0,
            description="Divides positive and multiplies negative logits of the tokens of the prompt and of those "
            "generated before, as in Hugging Face transformers.",
        ),
        Option("penalties", keeps_state=True, is_recommended=True),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Meta(
            ge=-2.0,
            le=2.0,
            description="Subtracted from the logit of a token once for each time it was generated before.",
        ),
        Option("penalties", keeps_state=True),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Meta(ge=-2.0, le=2.0, description="Subtracted from the logit of every token that was generated before."),
        Option("penalties", keeps_state=True),
    ] = 0.0
    min_tokens: Annotated[
        int,
        Meta(ge=0, lt=2**31, description="No EOS and no stop token before this many tokens."),
        Option("masks", keeps_state=True),
    ] = 0
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Meta(description="The only tokens that are ever chosen. EOS is not, unless it is listed."),
        Bound("items", 1),
        Option("masks", keeps_state=True, holds="token_ids"),
    ] = None
    temperature: Annotated[
        float,
        Meta(ge=0.0, le=2.0, description="0 is greedy: the most likely token, ties to the lowest id."),
        Option("scaling", is_recommended=True),
    ] = 1.0
    top_k: Annotated[
        int,
        Meta(ge=0, lt=2**31, description="Keep the k most likely tokens; 0 or -1 keeps all."),
        Bound("value", -1, 2**31 - 1),
        Option("cuts", alias=-1, is_recommended=True),
    ] = 0
    top_p: Annotated[
        float,
        Meta(
            ge=0.0,
            le=1.0,
            description="Keep the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all, 0 "
            "only the most likely one.",
        ),
        Option("cuts", is_recommended=True),
    ] = 1.0
    min_p: Annotated[
        float,
        Meta(ge=0.0, le=1.0, description="Keep tokens at least min_p times as likely as the most likely one."),
        Option("cuts", is_recommended=True),
    ] = 0.0
    seed: Annotated[
        int | None,
        Meta(
            description="Seed of the counter-based key: (seed, position) decides the draw, never the batch. Without "
            "it, one is drawn for each prompt; choice i of `n` derives its own.",
        ),
        Bound("value", -(2**63), 2**63 - 1),
        Option("draw"),
    ] = None
    logprob_token_ids: Annotated[
        Annotated[Sequence[int], Meta(max_length=MAX_TOP_LOGPROBS)] | None,
        Meta(description="Tokens whose log-probabilities replace those of the most likely tokens; needs `logprobs`."),
        Bound("items", 1, "max_top_logprobs"),
        Option("logprobs", keeps_state=True, holds="token_ids"),
    ] = None
    stop_token_ids: Annotated[
        Sequence[int],
        Meta(description="Tokens that end the text."),
        Bound("items", 0, "max_stop_token_ids"),
        Option(holds="token_ids"),
    ] = ()
    ignore_eos: Annotated[bool, Meta(description="Continue after the model's EOS token."), Option()] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSamplingParams(SamplerOptions[TokenIds]):
    """One request's options as the engine gets them: validated, complete, words as token ids."""

    max_tokens: Annotated[int, Meta(ge=1)] = 16
    """Most tokens to generate."""
    num_top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """None: no log-probabilities; 0: those of the chosen tokens; n: also those of the n most likely tokens."""
    num_prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """The log-probabilities wanted for the prompt's tokens, all but the first, counted as in `num_top_logprobs`."""


@dataclass(frozen=True, slots=True)
class SlotInit:
    """The initial sampler state of a request that gets a slot and whose options need more than the step's columns."""

    slot: int
    sampling: EngineSamplingParams
    token_ids: np.ndarray  # int32, all known ones: the prompt, then what was generated
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    """Every token that `min_tokens` holds back, EOS among them."""
    has_prompt_ids: bool = True
    """False: the prompt is embeddings, and its ids have no meaning."""


_HINTS: Final[Mapping[str, Any]] = get_type_hints(SamplerOptions, include_extras=True)
OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {name: extra for name, hint in _HINTS.items() for extra in hint.__metadata__ if isinstance(extra, Option)}
)
COLUMNS: Final[Mapping[str, Option]] = MappingProxyType({name: o for name, o in OPTIONS.items() if o.stage is not None})
"""The options that travel to the device with every step, one int32 word each, in this order."""
DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({field.name: field.default for field in fields(SamplerOptions)})
RECOMMENDED: Final = tuple(name for name, option in OPTIONS.items() if option.is_recommended)


def option_type(name: str, word: Any) -> Any:
    """Return the annotated type of an option; `word` is the type of a word."""
    return _of_word(_HINTS[name], word)


def plain_type(name: str, word: Any) -> Any:
    return _of_word(get_type_hints(SamplerOptions)[name], word)


def option_meta(name: str) -> Meta:
    return next(extra for extra in _HINTS[name].__metadata__ if isinstance(extra, Meta))


def _of_word(hint: Any, word: Any) -> Any:
    return hint[word] if getattr(hint, "__parameters__", ()) else hint


def column_value(value: object) -> int | float:
    """Return the number that the device reads of an option: its value, or the size of a collection."""
    if isinstance(value, Sized):
        return len(value)
    return value if isinstance(value, int | float) else 0


def device_row(params: EngineSamplingParams, *, is_masked: bool = False) -> np.ndarray:
    """Return one request's columns as int32 words `[C]`, floats by their bits; made once per request.

    is_masked: every step brings a mask of the tokens that it allows; it replaces the request's `allowed_token_ids`.
    """
    row = np.empty(len(COLUMNS), np.int32)
    for i, name in enumerate(COLUMNS):
        value = column_value(getattr(params, name))
        row[i] = np.array(value, column_dtype(name)).view(np.int32)
        if name == "allowed_token_ids" and is_masked:
            row[i] = 1
    return row


def column_dtype(name: str) -> Literal["float32", "int32"]:
    """Return the type of an option's column: that of its default."""
    return "float32" if isinstance(DEFAULTS[name], float) else "int32"


def needs_state(params: EngineSamplingParams) -> bool:
    """Return True if the device must keep state for the request, such as counts of its tokens."""
    return any(
        option.keeps_state and column_value(getattr(params, name)) != column_value(DEFAULTS[name])
        for name, option in COLUMNS.items()
    )


def token_ids_of(params: EngineSamplingParams) -> dict[str, Collection[int]]:
    """Return the token ids that the options hold, by option."""
    held: dict[str, Collection[int]] = {}
    for name, option in OPTIONS.items():
        value = getattr(params, name) or ()
        if option.holds == "token_ids":
            held[name] = value
        elif option.holds == "words":
            held[name] = [token for word in value for token in word]
    return held


PADDING_ROW: Final = device_row(EngineSamplingParams(temperature=0.0))
"""Columns of a row without a request: greedy, and no option changes anything."""
