"""All of an engine that is known before its weights are read: the model's shape, the devices, the programs.

Loading the model and filling a compile cache for another machine both begin here.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass

import jax

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.models.skeleton import ModelSkeleton, array_bytes, make_skeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.buckets import resolve_limits
from jaxserve.runner.inputs import Program, programs
from jaxserve.runner.limits import Limits, context_notes, make_limits, make_policy
from jaxserve.runner.memory import kv_cache_bytes
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.program_key import host_facts
from jaxserve.runner.slots import slots_bytes
from jaxserve.runner.steps import abstract_params
from jaxserve.runner.upkeep import Keeping, Upkeep
from jaxserve.runner.warmup import MadeProgram, Progress, make_programs, make_upkeep
from jaxserve.sharding.mesh import MODEL_AXIS, Sharding, make_sharding

MAX_COMPILE_THREADS = 8
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Preparation:
    """One model on one set of devices, without its numbers."""

    device: jax.Device
    skeleton: ModelSkeleton
    sharding: Sharding
    limits: Limits

    @property
    def decoder(self) -> DecoderConfig:
        return self.skeleton.config

    @property
    def programs(self) -> tuple[Program, ...]:
        """All that this engine needs, largest first."""
        return programs(self.limits.buckets, self.limits.max_pages)

    def facts(self) -> dict[str, str]:
        """What the keys of the programs depend on, by name."""
        limits, policy, adapters = self.limits, self.skeleton.policy, self.skeleton.adapters
        model = hashlib.sha256(repr((self.decoder, self.skeleton.leaves)).encode()).hexdigest()[:16]
        return host_facts() | {
            "model config": model,
            "dtype policy": str(policy),
            "adapters": "none" if adapters is None else f"{adapters.count} of rank {adapters.rank}",
            "devices": str(len(self.sharding.devices)),
            "KV dtype": str(limits.kv_dtype),
            "KV page tokens": str(limits.spec.block_size),
            "KV pages": str(limits.num_blocks),
            "longest context": str(limits.max_model_len),
            "decode buckets": " ".join(map(str, limits.buckets.decode)),
            "mixed buckets": " ".join(map(str, limits.buckets.mixed)),
            "requests at a time": str(limits.buckets.max_num_seqs),
            "burst": str(limits.buckets.max_decode_steps),
        }

    @property
    def keeping(self) -> Keeping:
        limits = self.limits
        return Keeping(
            limits.pool_shape,
            limits.kv_dtype,
            limits.buckets.max_num_seqs,
            self.decoder.vocab_size,
            self.skeleton.policy.backend,
        )

    def make_programs(self, cache: ProgramCache, progress: Progress) -> dict[Program, MadeProgram]:
        """Load or compile all of them. Needs no weights."""
        return make_programs(
            self.skeleton,
            self.sharding,
            self.limits.pool_shape,
            self.limits.kv_dtype,
            self.programs,
            cache,
            num_threads=min(len(os.sched_getaffinity(0)), MAX_COMPILE_THREADS),
            progress=progress,
        )

    def make_upkeep(self, cache: ProgramCache) -> dict[Upkeep, MadeProgram]:
        """The same for those that run between steps."""
        return make_upkeep(self.keeping, self.sharding, cache)


def prepare(config: Config, decoder: DecoderConfig, adapters: AdaptersConfig | None = None) -> Preparation:
    """Size the engine, with room for `adapters`. Raises StartupError in one line, also when memory will not do."""
    for note in context_notes(config, decoder):
        _LOG.info(note)
    decoder = decoder.with_context(config.model.max_model_len)
    size = config.parallel.tensor_parallel_size
    device = first_device(size)
    policy = make_policy(config, decoder, chip_of(device))
    skeleton = make_skeleton(decoder, policy, adapters)
    sharding = make_sharding(decoder, size)
    kv_shards = size if sharding.rules["kv_heads"] == MODEL_AXIS else 1
    num_slots = resolve_limits(device.platform, config.scheduler).max_num_seqs
    held_bytes = _weight_bytes(skeleton, sharding) + slots_bytes(num_slots, decoder.vocab_size)
    held_bytes *= size if device.platform == "cpu" else 1
    kv_bytes = kv_cache_bytes(config.cache, device, kv_shards, held_bytes)
    limits = make_limits(config, decoder, policy, device.platform, kv_bytes)
    return Preparation(device, skeleton, sharding, limits)


def _weight_bytes(skeleton: ModelSkeleton, sharding: Sharding) -> int:
    """What the weights take on each device."""
    total = 0
    for leaf in abstract_params(skeleton, sharding):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        total += array_bytes(shape, leaf.dtype)
    return total


def first_device(num_devices: int) -> jax.Device:
    """The first of those to use. Where there is no accelerator, the CPU is made to look like as many devices as are asked for."""
    if num_devices > 1 and jax.config.jax_num_cpu_devices < num_devices:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", num_devices)
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, where the plugin is missing
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        reason = str(error) or "JAX has no plugin for it"
        raise ConfigError(f"no device can be used with JAX_PLATFORMS={platforms or '(not set)'}: {reason}") from error
