"""Divides the bytes of the cache among its groups.

Groups whose cache grows with the text have equally many pages. A sliding group needs pages for the window of each request
and for two chunks of prompts, of which one may be in flight; a state group needs a few slots per request. Both are sized for
as many requests of PLANNED_TOKENS tokens, or of the longest context if that is shorter, as fit together; what is left goes
to the groups that grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import jax.numpy as jnp

from jaxserve.config import Config
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.kv.spec import KVSpec
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.sharding.rules import AxisRules, cache_shards

PLANNED_TOKENS: Final = 4096
"""Length of the requests that sliding and state groups are sized for, where contexts may be longer."""
_COMMON_PAGE: Final = 16
"""Tokens of a page by default, or of a part of it on TPUs."""
SLOTS_PER_REQUEST: Final = 3
"""State slots per request: its own, and two snapshots."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The groups with pages and their numbers of pages, and the state slots."""

    specs: tuple[KVSpec, ...]
    num_blocks: tuple[int, ...]
    """Pages of each group over all data ranks, the null pages included."""
    slot_bytes: int = 0
    """Bytes of one slot over all layers; 0 without state groups."""
    num_state_slots: int = 0
    """Slots over all data ranks, the zero slots included."""
    num_ranks: int = 1
    """Data ranks, which have equal shares of pages and slots."""

    def of_ranks(self, num_ranks: int) -> CacheSizes:
        """Return the sizes over so many data ranks; these are those of one."""
        counts = tuple(num_ranks * count for count in self.num_blocks)
        return replace(self, num_blocks=counts, num_state_slots=num_ranks * self.num_state_slots, num_ranks=num_ranks)

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Tokens and pages of each window that has pages of its own, in the order of their page tables."""
        groups = zip(self.specs, self.num_blocks, strict=True)
        return tuple(dict.fromkeys((spec.window, count) for spec, count in groups if spec.window is not None))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        pages = sum(spec.bytes_per_block * count for spec, count in zip(self.specs, self.num_blocks, strict=True))
        return pages + self.slot_bytes * self.num_state_slots

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all groups."""
        return sum(spec.bytes_per_block for spec in self.specs)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of a long text needs."""
        growing = [spec for spec in self.specs if spec.window is None] or self.specs
        return sum(spec.bytes_per_token for spec in growing)

    def num_requests(self, num_tokens: int) -> int:
        """Return the number of requests of so many tokens that the cache holds at the same time."""
        counts = [
            (count // self.num_ranks - 1) // request_pages(spec, num_tokens)
            for spec, count in zip(self.specs, self.num_blocks, strict=True)
        ]
        counts += [self.num_state_slots // self.num_ranks - 1] if self.slot_bytes else []
        return self.num_ranks * min(counts)


def request_pages(spec: KVSpec, num_tokens: int) -> int:
    """Return the pages of a group that a request of so many tokens holds while it decodes."""
    num_pages = -(-num_tokens // spec.block_size)
    return num_pages if spec.window is None else min(num_pages, -(-spec.window // spec.block_size) + 2)


def with_cache_groups(config: Config, decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with the cache groups that the engine of `config` has.

    Windows have pages of their own if they are shorter than the longest context, without data-parallel attention and
    without tiers. Raises ConfigError for settings that do not work with blocks of tokens.
    """
    if decoder.compressed is not None:
        _check_blocks(config, decoder)
    windows = _window_sizes(decoder)
    longest = min(config.model.max_model_len or decoder.max_position, decoder.max_position)
    is_split = bool(windows) and min(windows) < longest
    is_split &= config.parallel.data_parallel_size == 1 and not config.tiers.has_stores
    return decoder if is_split == decoder.splits_windows else replace(decoder, splits_windows=is_split)


def _window_sizes(config: DecoderConfig) -> set[int]:
    """Return the windows of the layers that have one."""
    windows = {layer.sliding_window for layer in config.layers if layer.sliding_window is not None}
    if config.compressed is None:
        return windows
    blocks = {layer.compression.window for layer in config.layers if layer.compression is not None}
    return {config.compressed.window} | blocks


def _check_blocks(config: Config, decoder: DecoderConfig) -> None:
    """Raise ConfigError for a setting of the cache that does not work with attention to compressed blocks."""
    ranks, dtype = config.parallel.data_parallel_size, config.cache.kv_cache_dtype
    if ranks > 1:
        raise ConfigError(f"--data-parallel-size {ranks}: not with attention to compressed blocks")
    if dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {dtype}: not with attention to compressed blocks, whose scores it would round"
        )
    size = config.cache.block_size or _COMMON_PAGE
    rates = {layer.compression.rate for layer in decoder.layers if layer.compression and layer.compression.indexer}
    if any(size % rate for rate in rates):
        raise ConfigError(
            f"--block-size {size}: a multiple of {max(rates)}, the tokens of a block that an indexer chooses"
        )


def slot_bytes(decoder: DecoderConfig, activations: jnp.dtype, rules: AxisRules) -> int:
    """Return the bytes of one state slot over all layers and over the devices that split a page.

    Arrays that fewer devices split than the pages count as often as they are copied, those that more devices split in part.
    """
    shards, total = cache_shards(decoder, rules) // rules.count("pages"), 0
    for group in decoder.cache.states:
        for array in group.arrays:
            itemsize = 4 if array.dtype == "float32" else activations.itemsize
            own_shards = math.prod(rules.count(axis) for axis in array.axes)
            total += -(-group.num_layers * math.prod(array.shape) * itemsize * shards // own_shards)
    return total


def divide_cache(
    num_bytes: int,
    specs: tuple[KVSpec, ...],
    slot_bytes: int,
    *,
    longest: int,
    max_num_seqs: int,
    max_chunk: int,
) -> CacheSizes:
    """Return the sizes of several groups that `num_bytes` allow. Raises DoesNotFitError if one request has no room.

    longest: tokens of the longest context; max_chunk: prompt tokens of a step.
    """
    planned = min(longest, PLANNED_TOKENS)
    whole = [
        max(longest, (spec.window or 0) + 2 * spec.block_size) for spec in specs
    ]  # a window may exceed the longest context
    chunks = _chunk_pages(specs, max_chunk)
    fixed = slot_bytes + sum(spec.bytes_per_block * count for spec, count in zip(specs, chunks, strict=True))
    unit = SLOTS_PER_REQUEST * slot_bytes
    unit += sum(spec.bytes_per_block * request_pages(spec, planned) for spec in specs)
    smallest = fixed + SLOTS_PER_REQUEST * slot_bytes
    smallest += sum(spec.bytes_per_block * request_pages(spec, min(longest, specs[0].block_size)) for spec in specs)
    if num_bytes < smallest:
        raise DoesNotFitError(
            f"--kv-cache-memory of {num_bytes} bytes is too small: the model needs at least {smallest} bytes"
        )
    count = max(0, min(max_num_seqs, (num_bytes - fixed) // unit))
    slots = 1 + SLOTS_PER_REQUEST * max(1, count) if slot_bytes else 0
    blocks = [
        None if spec.window is None else chunk + max(count * request_pages(spec, planned), request_pages(spec, most))
        for spec, chunk, most in zip(specs, chunks, whole, strict=True)
    ]
    held = slots * slot_bytes
    held += sum(spec.bytes_per_block * (found or 0) for spec, found in zip(specs, blocks, strict=True))
    growing = sum(spec.bytes_per_block for spec in specs if spec.window is None)
    rest = (
        0 if not growing else min((num_bytes - held) // growing, max_num_seqs * -(-longest // specs[0].block_size) + 1)
    )
    if growing and rest < 2:
        raise DoesNotFitError(
            f"--kv-cache-memory of {num_bytes} bytes is too small: windows and states of one request need {held} of them"
        )
    return CacheSizes(specs, tuple(rest if found is None else found for found in blocks), slot_bytes, slots)


def context_bytes(
    specs: tuple[KVSpec, ...], slot_bytes: int, *, longest: int, max_num_seqs: int, max_chunk: int
) -> int:
    """Return the fewest bytes that `divide_cache` surely makes a cache of that holds a request of the longest context."""
    planned = min(longest, PLANNED_TOKENS)
    total = (1 + SLOTS_PER_REQUEST * max_num_seqs) * slot_bytes
    for spec, chunk in zip(specs, _chunk_pages(specs, max_chunk), strict=True):
        pages = request_pages(spec, longest)
        if spec.window is not None:
            pages = max(pages, max_num_seqs * request_pages(spec, planned))
        total += spec.bytes_per_block * (chunk + pages)
    return total


def _chunk_pages(specs: tuple[KVSpec, ...], max_chunk: int) -> list[int]:
    return [1 if spec.window is None else 3 + 2 * -(-max_chunk // spec.block_size) for spec in specs]
