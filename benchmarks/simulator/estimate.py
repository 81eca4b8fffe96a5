"""Step times by arithmetic: the bounds of `jaxserve plan`, slowed down by an assumed factor. Never a measurement."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.gpu.shapes import LLAMA_8B
from benchmarks.simulator.step_times import EngineShape, ProgramTimes, StepTable
from jaxserve.config import CacheConfig, Config, ModelConfig, ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.runner.limits import Limits
from jaxserve.tools.planning.devices import Rates, find_device
from jaxserve.tools.planning.fit import make_fit, model_sizes
from jaxserve.tools.planning.planner import read_model
from jaxserve.tools.planning.roofline import decode_bound, prefill_bound
from jaxserve.tools.planning.sizes import Sizes

SHARE_OF_BOUND = 0.7
"""Assumed speed of a step, relative to its bound. No device was measured."""


def estimate(device_name: str, *, num_devices: int = 1, block_size: int = 64, max_model_len: int = 8192) -> StepTable:
    """Return a table of Llama 3.1 8B on an accelerator of `jaxserve plan`. Raises ConfigError for another device."""
    device = find_device(device_name)
    if device.rates is None:
        raise ConfigError(f"--device {device_name}: no rates are published, measure it instead")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        config = Config(
            model=ModelConfig(model=folder, max_model_len=max_model_len),
            cache=CacheConfig(block_size=block_size),
            parallel=ParallelConfig(tensor_parallel_size=num_devices),
        )
        decoder = read_model(Path(folder)).decoder.with_context(max_model_len)
        sizes = model_sizes(config, decoder, device)
        limits = make_fit(config, decoder, device).limits
    return StepTable(
        title=f"Llama 3.1 8B on {num_devices} x {device.title}, estimated",
        source="estimated",
        method=f"The bounds of `jaxserve plan` ({device.rates.source}) divided by {SHARE_OF_BOUND}; not measured.",
        engine=_shape(limits),
        programs=_programs(sizes, device.rates, limits),
    )


def _shape(limits: Limits) -> EngineShape:
    return EngineShape(
        decode_buckets=limits.buckets.decode,
        mixed_buckets=limits.buckets.mixed,
        max_num_seqs=limits.buckets.max_num_seqs,
        max_decode_steps=limits.buckets.max_decode_steps,
        num_kv_blocks=limits.num_blocks,
        block_size=limits.spec.block_size,
        max_model_len=limits.max_model_len,
    )


def _programs(sizes: Sizes, rates: Rates, limits: Limits) -> dict[str, ProgramTimes]:
    itemsize = limits.kv_dtype.itemsize

    def decode_s(num_rows: int, context: int) -> float:
        return decode_bound(sizes, rates, itemsize, num_rows, context, fits=True).step_s / SHARE_OF_BOUND

    key_s = decode_s(1, 1025) - decode_s(1, 1024)
    programs = {f"decode/{rows}": ProgramTimes(decode_s(rows, 0), per_key_s=key_s) for rows in limits.buckets.decode}
    for tokens in limits.buckets.mixed:
        bound = prefill_bound(sizes, rates, tokens, tokens)
        attention_s = _attention_s(sizes, rates, tokens)
        programs[f"mixed/{tokens}"] = ProgramTimes(
            (bound.seconds - attention_s) / SHARE_OF_BOUND,
            per_key_s=key_s,
            per_pair_s=attention_s / (tokens * (tokens + 1) / 2) / SHARE_OF_BOUND,
        )
    return programs


def _attention_s(sizes: Sizes, rates: Rates, num_tokens: int) -> float:
    """Return the part of `prefill_bound` that grows with the square of the prompt: two chunks save half of it."""
    one, two = (prefill_bound(sizes, rates, factor * num_tokens, num_tokens).seconds for factor in (1, 2))
    return (two - 2 * one) / 2
