"""Sizes the KV cache by the memory of the devices."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError, DoesNotFitError
from jaxserve.kv.spec import KVSpec
from jaxserve.runner.host.memory import available_bytes

CPU_SHARE = 0.25
CPU_MOST_BYTES = 2 << 30
"""More than this only holds a request of the whole context."""
WORKSPACE_BYTES = 1 << 30
"""Left free on an accelerator for activations, logits and the compiler's scratch."""
START_BYTES = 512 << 20
"""A cold start on a CPU takes about this for compiling, beside weights and KV cache."""
CPU_STEPS = 2
ACCELERATOR_STEPS = 64
"""Sizes per power of two that a measured KV cache may have. The free memory of a host changes all the time; that of an
accelerator hardly does, and less than 1/64 of it stays unused."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    limit: int
    """All that the runtime can allocate; on a CPU, the memory that was free before anything was placed."""
    in_use: int


def kv_cache_bytes(
    config: CacheConfig,
    device: jax.Device,
    kv_shards: int,
    held_bytes: int = 0,
    context_bytes: int = 0,
    num_replicas: int = 1,
) -> int:
    """Return the bytes for the KV cache over all devices, from the settings or measured.

    held_bytes: weights and slots, which are placed later, on each device or in the one memory of a CPU. context_bytes: those
    of a cache that holds a request of the whole context. num_replicas: engines that share the memory of a CPU; this is the first.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if device.platform == "cpu":
        memory = DeviceMemory(available_bytes() // num_replicas, held_bytes)
        return kv_bytes_left(config, "cpu", memory, kv_shards, context_bytes)
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device.device_kind} does not report its memory: give --kv-cache-memory")
    memory = DeviceMemory(int(stats["bytes_limit"]), int(stats["bytes_in_use"]) + held_bytes)
    return kv_bytes_left(config, device.platform, memory, kv_shards)


def check_host_memory(num_bytes: int, held_bytes: int, config: CacheConfig, num_replicas: int = 1) -> None:
    """Raise DoesNotFitError for a KV cache larger than this host's free memory: the system would kill us much later.

    Log a warning if too little is left to compile, beside the cache and the `held_bytes` of `kv_cache_bytes`. Only an engine that
    measures its cache starts before the other replicas: the memory of those that run is not free.
    """
    free = available_bytes()
    if num_bytes > free:
        raise DoesNotFitError(
            f"a KV cache of {num_bytes / 2**30:.2f} GiB is more than the {free / 2**30:.2f} GiB that are free on this "
            "host: lower --kv-cache-memory, --max-num-seqs or --max-model-len"
        )
    is_first = config.kv_cache_memory is None
    left = max(0, (free // num_replicas if is_first else free) - held_bytes - num_bytes)
    if left < START_BYTES:
        _LOG.warning(
            "%d MiB are left beside weights and KV cache; compiling takes about %d, and the kernel kills an engine without "
            "memory: raise the limit of its container, or lower --kv-cache-memory",
            left >> 20,
            START_BYTES >> 20,
        )


def check_offload_memory(num_bytes: int) -> None:
    """Raise DoesNotFitError for copies of pages that take more than this host's free memory."""
    free = available_bytes()
    if num_bytes > free:
        raise DoesNotFitError(
            f"--kv-offload-memory of {num_bytes / 2**30:.2f} GiB is more than the {free / 2**30:.2f} GiB that are free on "
            "this host: lower it"
        )


def kv_bytes_left(
    config: CacheConfig, platform: str, memory: DeviceMemory, kv_shards: int, context_bytes: int = 0
) -> int:
    """Return the bytes for the KV cache over all devices, after weights and slots are in `memory`.

    context_bytes: those of a cache that holds a request of the whole context.
    """
    if platform == "cpu":  # all of its "devices" share one memory
        if memory.in_use >= memory.limit:
            raise DoesNotFitError(
                f"no memory left for the KV cache: the weights and what belongs to slots take {memory.in_use / 2**30:.2f} GiB, "
                f"and {memory.limit / 2**30:.2f} GiB are free within the limits of this host and its control groups; use more "
                "memory, a smaller --dtype or a --quantization"
            )
        most = max(CPU_MOST_BYTES, context_bytes)
        return max(0, min(_steady(int((memory.limit - memory.in_use) * CPU_SHARE), CPU_STEPS), most))
    free = int(memory.limit * config.memory_fraction) - memory.in_use - WORKSPACE_BYTES
    if free <= 0:
        raise DoesNotFitError(
            f"no memory left for the KV cache: {memory.in_use / 2**30:.2f} of {memory.limit / 2**30:.2f} GiB are in use, "
            f"{WORKSPACE_BYTES >> 30} GiB is workspace and --memory-fraction is {config.memory_fraction}; "
            "use more devices (--tensor-parallel-size) or a smaller dtype"
        )
    return _steady(free, ACCELERATOR_STEPS) * kv_shards


def _steady(num_bytes: int, steps: int) -> int:
    """Round down to one of `steps` values per power of two: a measured size that is a little different at the next
    start would change the shape of every program, and none would be found in the compile cache."""
    unit = max(1, (1 << max(num_bytes, 1).bit_length() - 1) // steps)
    return num_bytes // unit * unit


def num_kv_blocks(num_bytes: int, spec: KVSpec, max_model_len: int, max_num_seqs: int) -> int:
    """Return the pages of the pool, the null page included; never more than full requests could use."""
    most = max_num_seqs * -(-max_model_len // spec.block_size) + 1
    return min(spec.num_blocks_for(num_bytes), most)


def fit_model_len(wanted: int | None, declared: int, num_blocks: int, spec: KVSpec) -> int:
    """Return the context length to serve: `wanted`, or `declared` if the pool holds it.

    wanted: --max-model-len; declared: the checkpoint's limit.
    """
    if wanted is not None and wanted > declared:
        raise ConfigError(f"--max-model-len {wanted} is more than the {declared} tokens the model was made for")
    capacity = (num_blocks - 1) * spec.block_size
    length = wanted if wanted is not None else declared
    if length <= capacity:
        return length
    if wanted is not None:
        raise DoesNotFitError(
            f"--max-model-len {wanted} does not fit the KV cache of {capacity} tokens "
            f"({num_blocks - 1} pages of {spec.block_size}): lower it or raise --kv-cache-memory "
            f"to {(-(-wanted // spec.block_size) + 1) * spec.bytes_per_block} bytes"
        )
    _LOG.warning("context shortened from %d to the %d tokens that the KV cache holds", declared, capacity)
    return capacity
