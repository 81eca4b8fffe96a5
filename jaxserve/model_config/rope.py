"""Rotary position embeddings (RoPE) and their scalings, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RotaryPairs = Literal["halves", "swapped_halves", "adjacent"]
"""Dimensions that rotate together: i and i + R / 2 (Llama), i + R / 2 and i (NanoChat, which turns the other way round), or 2 i
and 2 i + 1 (GLM)."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies for long contexts. Fields a kind does not use stay None.

    linear:  all frequencies / factor
    llama3:  https://github.com/meta-llama/llama-models (low frequencies / factor, smooth in between)
    yarn:    arXiv 2309.00071 (NTK-by-parts, with the attention factor)
    dynamic: NTK-aware base; equals no scaling up to the declared length, and longer contexts are not served
    longrope: arXiv 2402.13753 (one divisor per frequency, with the attention factor)
    proportional: the first pairs of dimensions rotate with the frequencies that they have where all rotate, the others
        do not (Gemma 4)
    """

    kind: Literal["linear", "llama3", "yarn", "dynamic", "longrope", "proportional"]
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    """True if the bounds between parts are rounded to whole dimensions."""
    short_divisors: tuple[float, ...] | None = None
    """Divisors for contexts up to the original length: see `DecoderConfig.with_context`."""
    long_divisors: tuple[float, ...] | None = None
    """Divisors for longer contexts."""
    num_pairs: int | None = None
    """Pairs of dimensions that rotate."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Factor 1 + slope * ln(1 + floor((position + offset) / period)) on queries, for attention over long texts (Llama 4)."""

    slope: float
    period: int
    offset: int = 0
    only_without_rope: bool = False
    """True: layers that rotate queries do not scale them."""
