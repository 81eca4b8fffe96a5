"""Proposes changes with which a model fits. Every proposal is checked with the arithmetic of `fit`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from jaxserve.config import Config, Dtype
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.quant.names import NO_QUANTIZATION, format_names
from jaxserve.quant.registry import find_format
from jaxserve.runner.limits import kv_context_bytes, weights_dtype
from jaxserve.runtime.settings import BY_NAME, Value, format_value
from jaxserve.tools.planning.devices import ACCELERATORS, Device
from jaxserve.tools.planning.fit import Fit, held_bytes, make_fit, model_sizes, planned_draft, planned_policy

_LARGEST_PERCENT = 99


@dataclass(frozen=True, slots=True)
class Advice:
    """One change with which the model fits, and the context and KV cache that result."""

    change: str
    """Flags to add or to replace."""
    max_model_len: int
    num_kv_tokens: int
    """Tokens that the KV cache holds."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A changed config or device, and the flags for it."""

    change: str
    config: Config
    device: Device


def find_advice(config: Config, decoder: DecoderConfig, device: Device) -> tuple[Advice, ...]:
    """Return the smallest change of each kind that fits; if none does, pairs of a change and more devices."""
    kinds = [
        smaller_dtypes(config, device),
        _quantizations(config, decoder, device),
        _contexts(config, decoder, device),
        _cache_sizes(config, decoder, device),
        _fractions(config, device),
        device_counts(config, device),
        other_devices(config, device),
    ]
    found = [advice for kind in kinds if (advice := _first_that_fits(kind, decoder)) is not None]
    if found:
        return tuple(found)
    pairs = [
        (
            replace(second, change=f"{first.change} {second.change}")
            for first in firsts
            for second in device_counts(first.config, first.device)
        )
        for firsts in (
            (*smaller_dtypes(config, device), *_quantizations(config, decoder, device)),
            other_devices(config, device),
        )
    ]
    return tuple(advice for pair in pairs if (advice := _first_that_fits(pair, decoder)) is not None)


def advice_for(change: str, fit: Fit) -> Advice:
    """Return the change with its context and KV cache."""
    limits = fit.limits
    return Advice(change, limits.max_model_len, limits.num_usable_blocks * limits.spec.block_size)


def _first_that_fits(attempts: Iterator[Attempt], decoder: DecoderConfig) -> Advice | None:
    for tried in attempts:
        with contextlib.suppress(DoesNotFitError, ConfigError):  # a draft model may not divide over so many devices
            return advice_for(tried.change, make_fit(tried.config, decoder, tried.device))
    return None


def smaller_dtypes(config: Config, device: Device) -> Iterator[Attempt]:
    """Yield the dtypes that take less memory."""
    current = weights_dtype(config, device.platform)
    for name in get_args(Dtype):
        if name == "auto":
            continue
        smaller = attempt(config, device, "dtype", name)
        if weights_dtype(smaller.config, device.platform).itemsize < current.itemsize:
            yield smaller


def _quantizations(config: Config, decoder: DecoderConfig, device: Device) -> Iterator[Attempt]:
    if config.model.quantization not in ("auto", NO_QUANTIZATION):
        return
    has_blocks = decoder.stored is not None and bool(decoder.stored.stored_kinds)
    for name in sorted(set(format_names()) - {NO_QUANTIZATION}, key=_advice_order):
        found = find_format(name)
        if (found.keeps_blocks and not has_blocks) or (found.only_experts and decoder.experts is None):
            continue
        yield attempt(config, device, "quantization", name)


def _advice_order(name: str) -> tuple[bool, int, bool, str]:
    """Blocks first, which keep the file's values, then most bits; of formats with as many, integers first: every device
    computes them."""
    found = find_format(name)
    is_integer = np.issubdtype(found.values_dtype(np.dtype(np.float32), "cpu"), np.integer)
    return (not found.keeps_blocks, -found.bits, not is_integer, name)


def _contexts(config: Config, decoder: DecoderConfig, device: Device) -> Iterator[Attempt]:
    """Yield the longest context that fits, if the config asks for a longer one."""
    if config.model.max_model_len is None:
        return
    try:
        fit = make_fit(attempt(config, device, "max_model_len", None).config, decoder, device)
    except DoesNotFitError:
        return
    yield attempt(config, device, "max_model_len", min(fit.limits.max_model_len, config.model.max_model_len))


def _cache_sizes(config: Config, decoder: DecoderConfig, device: Device) -> Iterator[Attempt]:
    """Yield the size that one longest request needs, then the largest sizes that fit."""
    asked = config.cache.kv_cache_memory
    if asked is None and device.platform != "cpu":
        return  # the cache has all the memory already: --memory-fraction decides
    policy, draft = planned_policy(config, decoder, device), planned_draft(config, decoder, device)
    needed = kv_context_bytes(config, decoder, policy, device.platform, draft)
    candidates = [-(-needed >> 20) << 20]
    sizes = model_sizes(config, decoder, device)
    free = device.limit_bytes - held_bytes(device, sizes, sizes.weights_bytes)
    most = free * sizes.kv_shards // held_bytes(device, sizes, 1)
    candidates += [most * percent // 100 for percent in range(95, 0, -5)]
    for num_bytes in candidates:
        if num_bytes >> 20 and num_bytes != asked:
            yield attempt(config, device, "kv_cache_memory", num_bytes >> 20 << 20)


def _fractions(config: Config, device: Device) -> Iterator[Attempt]:
    if config.cache.kv_cache_memory is not None or device.platform == "cpu":
        return
    for percent in range(int(config.cache.memory_fraction * 100) + 1, _LARGEST_PERCENT + 1):
        yield attempt(config, device, "memory_fraction", percent / 100)


def device_counts(config: Config, device: Device) -> Iterator[Attempt]:
    """Yield more devices for each layer."""
    start = config.parallel.tensor_parallel_size * 2
    for count in itertools.takewhile(lambda count: count <= device.most_per_host, (start << n for n in range(10))):
        yield attempt(config, device, "tensor_parallel_size", count)


def other_devices(config: Config, device: Device) -> Iterator[Attempt]:
    """Yield the accelerators with more memory, the smallest first."""
    if device.platform == "cpu":
        return
    for other in sorted(ACCELERATORS.values(), key=lambda other: other.limit_bytes):
        if other.limit_bytes > device.limit_bytes and config.parallel.tensor_parallel_size <= other.most_per_host:
            yield Attempt(f"--device {other.name}", config, other)


def attempt(config: Config, device: Device, name: str, value: Value) -> Attempt:
    """Return `config` with another value of the setting `name`, and the flag that gives it."""
    setting = BY_NAME[name]
    section = replace(getattr(config, setting.section), **{name: value})
    change = f"{setting.flag} {format_value(setting, value)}"
    return Attempt(change, replace(config, **{setting.section: section}), device)
