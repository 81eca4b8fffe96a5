"""Step shapes by platform.

Padding costs time if XLA computes on a CPU: a step is bound by arithmetic from a handful of rows on. It is free on an
accelerator, where a decode step is bound by reading the weights, and nearly free with the native CPU kernels, which skip
it: these need half the shapes, and start in half the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.plan import Buckets

MIN_MIXED_TOKENS = 16
MAX_DECODE_STEPS = 8
"""Decode steps in one call. On GPUs it is one: there the host runs a loop, and waits after every iteration."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step; tokens are never fewer than requests."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_LIMITS = StepLimits(max_num_seqs=32, max_num_batched_tokens=128)
ACCELERATOR_LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=2048)


def resolve_limits(platform: str, config: SchedulerConfig) -> StepLimits:
    """Return the limits of the settings, with the platform's defaults, made to fit, for settings that are not given."""
    default = CPU_LIMITS if platform == "cpu" else ACCELERATOR_LIMITS
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = default.max_num_seqs if tokens is None else min(default.max_num_seqs, tokens)
    if tokens is None:
        tokens = max(default.max_num_batched_tokens, seqs)
    return StepLimits(seqs, tokens)


def page_tokens(platform: str, setting: int | None) -> int:
    """Return the tokens of a KV page: the setting, or the platform's default.

    TPUs copy page by page: 64 tokens of two KV heads, a device's share of most models on four chips, are 32 KiB.
    """
    if setting is not None:
        return setting
    return 64 if platform == "tpu" else 16


def make_buckets(
    platform: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    min_decode: int = 1,
    growth: int = 2,
    num_drafts: int = 0,
    plans_have_drafts: bool = False,
) -> Buckets:
    """Return the bucket table for these limits. The largest buckets are the limits themselves.

    min_decode: 2 if a one-row matmul is slower than a two-row one (bfloat16 on a CPU).
    growth: ratio of neighbouring buckets.
    num_drafts, plans_have_drafts: as in `Buckets`.
    """
    mixed_floor = MIN_MIXED_TOKENS if platform == "cpu" else 8 * MIN_MIXED_TOKENS
    return Buckets(
        decode=_ladder(min(min_decode, max_num_seqs), max_num_seqs, growth),
        mixed=_ladder(min(mixed_floor, max_num_batched_tokens), max_num_batched_tokens, growth),
        max_num_seqs=max_num_seqs,
        max_decode_steps=1 if platform in ("gpu", "cuda", "rocm") else MAX_DECODE_STEPS,
        num_drafts=num_drafts,
        plans_have_drafts=plans_have_drafts,
    )


CPU_TABLE_PAGES: Final = 512
CPU_POOL_TOKENS: Final = 2048


def table_pages(platform: str, num_pages: int) -> int:
    """Return the pages per request that programs hold tables for, at least `num_pages`.

    On CPUs, where a wider table costs nothing but the copy of its zeros (32 rows of 512 pages: 64 KiB a step), many context
    lengths share one width, so that a changed --max-model-len finds its programs in the compile cache. Accelerators get the
    table by a slower bus, and exactly as wide as it must be.
    """
    if platform != "cpu":
        return num_pages
    width = CPU_TABLE_PAGES
    while width < num_pages:
        width *= 4
    return width


def pool_context(platform: str, max_model_len: int) -> int:
    """Return the tokens per request that the KV cache is made for at most.

    On CPUs never fewer than CPU_POOL_TOKENS, so that its size, which is part of every program, is the same for most context
    lengths. What requests do not need holds prefixes.
    """
    return max(max_model_len, CPU_POOL_TOKENS) if platform == "cpu" else max_model_len


EMBED_TOKENS = {"cpu": 512}
"""Tokens of a step that embeds, by platform: many, as no request waits for a next token. The default is MAX_EMBED_TOKENS,
enough to be bound by an accelerator's arithmetic."""
MAX_EMBED_TOKENS = 8192


def resolve_embed_limits(platform: str, config: SchedulerConfig, max_model_len: int | None) -> StepLimits:
    """Return texts and tokens of a step that embeds; max_model_len: as the settings give it, which must fit in."""
    default = CPU_LIMITS if platform == "cpu" else ACCELERATOR_LIMITS
    tokens = config.max_num_batched_tokens
    if tokens is None:
        tokens = max(EMBED_TOKENS.get(platform, MAX_EMBED_TOKENS), config.max_num_seqs or 1, max_model_len or 1)
    return StepLimits(min(config.max_num_seqs or default.max_num_seqs, tokens), tokens)


def embed_buckets(platform: str, limits: StepLimits) -> Buckets:
    """Return the bucket table for these limits."""
    floor = MIN_MIXED_TOKENS if platform == "cpu" else 8 * MIN_MIXED_TOKENS
    tokens = limits.max_num_batched_tokens
    return Buckets((), _ladder(min(floor, tokens), tokens, 2), limits.max_num_seqs)


def _ladder(smallest: int, largest: int, growth: int) -> tuple[int, ...]:
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= growth
    return (*sizes, largest)
