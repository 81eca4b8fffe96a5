"""Sampling options as they cross the wire, and the device columns that derive from them.

A new option is one annotated field here and one function of the same name in `transforms.py`; a test
fails when either half is missing. Fields with a `Column` travel to the device with every step, one int32
each (floats bit-cast), in field order; of a collection it is the size that travels, and what is in it
lies in the request's slot. Fields without a column are decided on the host.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from jaxserve.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS


@dataclass(frozen=True)
class Column:
    """A field that the device program reads: one int32 word per row."""

    dtype: Literal["float32", "int32"]
    neutral: float | None = None
    """Another value than this one, the neutral one, needs more of the request than the column: see `needs_state`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True):
    """One request's options, validated and complete (no field is left to a later default)."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0), Column("float32")] = 1.0
    """0 is greedy: the most likely token, ties to the lowest id."""
    top_k: Annotated[int, Meta(ge=0, lt=2**31), Column("int32")] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0), Column("float32")] = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0), Column("float32")] = 0.0
    """Keep tokens at least min_p times as likely as the most likely one."""
    seed: Annotated[int, Meta(ge=0, lt=2**31), Column("int32")] = 0
    """Seed of the counter-based key: (seed, position) decides the draw, never the batch."""

    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0), Column("float32", neutral=0)] = 0.0
    """Taken from the logit of every token that was generated before."""
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0), Column("float32", neutral=0)] = 0.0
    """Taken from the logit of a token once for each time it was generated before."""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0), Column("float32", neutral=1)] = 1.0
    """Divides positive and multiplies negative logits of the prompt's tokens and of those generated before."""
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31), Column("int32", neutral=0)] = 0
    """No EOS and no stop token among the first so many tokens."""
    logit_bias: Annotated[
        dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]],
        Meta(max_length=MAX_LOGIT_BIAS),
        Column("int32", neutral=0),
    ] = {}
    """Added to the logits of these tokens."""
    allowed_token_ids: Annotated[tuple[int, ...], Column("int32", neutral=0)] = ()
    """Nothing else is ever chosen; empty allows all."""
    bad_words: Annotated[
        tuple[Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)], ...],
        Meta(max_length=MAX_BAD_WORDS),
        Column("int32", neutral=0),
    ] = ()
    """Sequences of tokens of which none is ever completed."""

    logprob_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_TOP_LOGPROBS), Column("int32", neutral=0)] = ()
    """Tokens whose log-probabilities are told in the place of those of the most likely ones, which are as many."""

    max_tokens: Annotated[int, Meta(ge=1)] = 16
    """Most tokens to generate."""
    num_top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """None: no log-probabilities; 0: of the chosen token only; n: and of the n most likely."""
    num_prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """The same for the prompt's own tokens, all but the first."""
    ignore_eos: bool = False
    """Go on after the model's end token."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text."""


RECOMMENDED: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields for which a checkpoint's generation_config.json may have a better default."""


def device_columns() -> dict[str, Column]:
    """The fields the device program reads, in order, with their device type."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    found = {}
    for name, hint in hints.items():
        columns = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Column)]
        if columns:
            found[name] = columns[0]
    return found


COLUMNS: dict[str, Column] = device_columns()


def device_row(params: SamplingParams, *, is_masked: bool = False) -> np.ndarray:
    """One request's columns as int32 words `[C]`, floats bit-cast; made once per request.

    is_masked: every step brings the tokens that it allows; to the device they are `allowed_token_ids`.
    """
    row = np.empty(len(COLUMNS), np.int32)
    for i, (name, column) in enumerate(COLUMNS.items()):
        row[i] = np.array(_value(params, name), column.dtype).view(np.int32)
        if name == "allowed_token_ids" and is_masked:
            row[i] = 1
    return row


def needs_state(params: SamplingParams) -> bool:
    """Whether the device has to know more of the request than its columns, such as the tokens it has so far."""
    return any(
        column.neutral is not None and _value(params, name) != column.neutral for name, column in COLUMNS.items()
    )


def _value(params: SamplingParams, name: str) -> float:
    value = getattr(params, name)
    return len(value) if isinstance(value, Sized) else value
