"""Derives dtypes, KV pages, context length and step shapes from settings, model, platform and memory.

Pure arithmetic, so that `jaxserve plan` for a device that is not present and the server that later runs on it agree.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.kv_write import E4M3_BITS
from jaxserve_kernels.paged_attention import pool_heads

from jaxserve.config import Config, ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.spec import KVSpec
from jaxserve.layers.cache import CacheShapes, group_shapes
from jaxserve.layers.policy import DtypePolicy, KVScaleKind
from jaxserve.model_config.cache import CacheGroup
from jaxserve.model_config.checkpoint_quantization import CheckpointQuantization
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.quant.names import NO_QUANTIZATION
from jaxserve.quant.policy import QuantPolicy
from jaxserve.quant.registry import find_format
from jaxserve.quant.stored_blocks import StoredKinds, without_kernel
from jaxserve.runner.backend import Chip, choose_backend, choose_encoder_backend, matmul_backend, why_no_state_kernel
from jaxserve.runner.buckets import make_buckets, page_tokens, pool_context, resolve_limits, table_pages
from jaxserve.runner.cache_sizes import CacheSizes, context_bytes, divide_cache, slot_bytes
from jaxserve.runner.inputs import DraftModel
from jaxserve.runner.memory import fit_model_len, num_kv_blocks
from jaxserve.scheduler.plan import Buckets
from jaxserve.sharding.rules import MeshShape, axis_rules

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of one engine."""

    cache: CacheSizes
    shapes: CacheShapes | None
    """The cache on the devices; None for an encoder."""
    kv_dtype: jnp.dtype
    max_model_len: int
    max_pages: int
    """Pages per request that the programs' page tables hold: enough for `max_model_len`."""
    buckets: Buckets
    num_ranks: int = 1
    """Groups of devices that have as many pages each, and requests of their own."""

    @property
    def program_sizes(self) -> tuple[int, int, int]:
        """Pages of a table, page tables of a request and state slots, as `inputs.programs` takes them."""
        return self.max_pages, 1 + len(self.cache.windows), self.cache.num_state_slots

    @property
    def spec(self) -> KVSpec:
        """The first cache group: one whose pages grow with the text, if there is one."""
        return self.cache.specs[0]

    @property
    def num_blocks(self) -> int:
        """Pages of the first cache group."""
        return self.cache.num_blocks[0]

    @property
    def num_usable_blocks(self) -> int:
        """Pages of the first group that requests can hold: all but the null page of each rank."""
        return self.num_blocks - self.num_ranks

    @property
    def summary(self) -> str:
        """The values that the settings left open, by setting."""
        return (
            f"max_num_seqs={self.buckets.max_num_seqs} max_num_batched_tokens={max(self.buckets.mixed)} "
            f"max_model_len={self.max_model_len} num_kv_blocks={self.num_blocks}"
            + "".join(f" window_{window}_blocks={count}" for window, count in self.cache.windows)
            + (f" state_slots={self.cache.num_state_slots}" if self.cache.num_state_slots else "")
        )


def weights_dtype(config: Config, platform: str) -> jnp.dtype:
    """auto: float32 on CPUs, which compute it faster than bfloat16 unless they have AVX512-BF16 or AMX."""
    name = config.model.dtype
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def mesh_shape(config: ParallelConfig) -> MeshShape:
    """Return the parallel sizes of an engine."""
    return MeshShape(config.tensor_parallel_size, config.expert_parallel_size, config.data_parallel_size)


def make_policy(config: Config, decoder: DecoderConfig, chip: Chip) -> DtypePolicy:
    """CPUs compute activations in float32 whatever the weights are stored in. Raises ConfigError."""
    attention = choose_backend(config, decoder, chip, _activations(config, chip), kv_cache_dtype(config, chip.platform))
    for note in quantization_notes(config, decoder, chip):
        _LOG.info(note)
    backend = matmul_backend(config, decoder, chip, attention)
    reason = why_no_state_kernel(decoder, backend)
    if reason is not None:
        _LOG.info("recurrent states are computed by XLA, not by a Pallas kernel: %s", reason)
    policy = _policy(config, chip, backend, _quant_policy(config, decoder, chip))
    policy = replace(policy, kv_scales=_kv_scale_kind(config, decoder))
    return policy if policy.backend == attention else replace(policy, attention=attention)


def _kv_scale_kind(config: Config, decoder: DecoderConfig) -> KVScaleKind | None:
    """Return the scales of the KV cache. Raises ConfigError for a cache that needs some and cannot have them."""
    wanted = config.cache.kv_cache_dtype
    if wanted == "int8" and (decoder.latent is not None or any(layer.blocks is not None for layer in decoder.layers)):
        has = "latent attention (MLA), whose vectors" if decoder.latent is not None else "indexers, whose keys"
        raise ConfigError(f"--kv-cache-dtype int8: not with {has} have no scales")
    if wanted == "auto" or decoder.latent is not None:
        return None
    if decoder.stored is not None and decoder.stored.kv_scales == wanted:
        return "heads"
    return "numbers" if wanted == "int8" else None


def make_encoder_policy(config: Config, chip: Chip) -> DtypePolicy:
    """Return the policy of an encoder, which is never stored quantised. Raises ConfigError."""
    name = _format_name(config, None)
    _kept_kinds(name, None)
    _check_experts(name, has_experts=False)
    quant = QuantPolicy(name, platform=chip.platform)
    return _policy(config, chip, choose_encoder_backend(config, chip), quant)


def _policy(config: Config, chip: Chip, backend: Backend, quant: QuantPolicy) -> DtypePolicy:
    shape, exchange = mesh_shape(config.parallel), config.parallel.expert_exchange
    if exchange == "auto" and chip.platform == "cpu":
        exchange = "all-reduce"
    return DtypePolicy(
        weights_dtype(config, chip.platform),
        _activations(config, chip),
        quant,
        backend,
        # GPUs start less and compute larger matmuls if they are fused; a CPU would only copy their results.
        fused_for=shape.num_devices if chip.platform == "gpu" else 0,
        mesh=shape,
        exchange=exchange,
    )


def _activations(config: Config, chip: Chip) -> jnp.dtype:
    return jnp.dtype("float32") if chip.platform == "cpu" else weights_dtype(config, chip.platform)


def _quant_policy(config: Config, decoder: DecoderConfig, chip: Chip) -> QuantPolicy:
    name, stored = _format_name(config, decoder.stored), decoder.stored
    kinds = _kept_kinds(name, stored)
    _check_experts(name, has_experts=decoder.experts is not None)
    if stored is None or stored.format != name or name == NO_QUANTIZATION:
        return QuantPolicy(name, stored_kinds=kinds, platform=chip.platform)
    is_stored = config.model.quantization == "auto"
    plain_matrices = stored.plain_matrices if is_stored else ()
    return QuantPolicy(
        name, stored.group_size, stored.has_offsets, plain_matrices, is_stored=is_stored, platform=chip.platform
    )


def _kept_kinds(name: str, stored: CheckpointQuantization | None) -> StoredKinds:
    """Return the block types of matrices that the format keeps. Raises ConfigError if it keeps blocks and there are none."""
    if not find_format(name).keeps_blocks:
        return ()
    if stored is None or not stored.stored_kinds:
        raise ConfigError(
            f"--quantization {name}: keeps the quantised blocks of a GGUF file, and this model has none; use int8"
        )
    return stored.stored_kinds


def _check_experts(name: str, *, has_experts: bool) -> None:
    """Raise ConfigError if the format quantises only the matrices of experts and there are none."""
    if find_format(name).only_experts and not has_experts:
        raise ConfigError(f"--quantization {name}: quantises experts, and this model has none; use int4-weight-only")


def _format_name(config: Config, stored: CheckpointQuantization | None) -> str:
    """Return the format of matrices. auto: the one that keeps what is stored."""
    if config.model.quantization != "auto":
        return config.model.quantization
    return NO_QUANTIZATION if stored is None else stored.format


def quantization_notes(config: Config, decoder: DecoderConfig, chip: Chip) -> list[str]:
    """Return what a user should know of quantised weights of this model on this device."""
    stored, notes = decoder.stored, list[str]()
    if config.model.quantization == "auto" and stored is not None and stored.note is not None:
        notes.append(stored.note)
    found = find_format(_format_name(config, stored))
    notes.extend(found.notes(chip.platform, chip.capability))
    if stored is not None and stored.kv_scales is not None and config.cache.kv_cache_dtype == "auto":
        notes.append(
            f"the checkpoint has scales for a KV cache in {stored.kv_scales}: --kv-cache-dtype {stored.kv_scales} uses them"
        )
    if found.keeps_blocks and stored is not None and (note := without_kernel(stored.stored_kinds)) is not None:
        notes.append(note)
    return notes


def context_notes(config: Config, decoder: DecoderConfig) -> list[str]:
    """Return notes for the user of a model whose context can be stretched."""
    served = decoder.with_context(config.model.max_model_len)
    if config.model.max_model_len is not None or served.max_position == decoder.max_position:
        return []
    return [
        f"the model's context is {served.max_position:,} tokens as it is; --max-model-len asks for up to "
        f"{decoder.max_position:,}, for which it stretches the angles of short texts too"
    ]


def kv_cache_dtype(config: Config, platform: str) -> jnp.dtype:
    """Return the dtype of keys and values in the cache.

    XLA:CPU converts a whole pool of other floats than float32 for every write.
    """
    wanted = config.cache.kv_cache_dtype
    if wanted != "auto":
        return jnp.dtype("int8" if wanted == "int8" else "float8_e4m3fn")
    return jnp.dtype("float32") if platform == "cpu" else weights_dtype(config, platform)


def pool_dtype(config: Config, platform: str) -> jnp.dtype:
    """Return the dtype of the arrays that hold the cache's numbers."""
    is_bits = platform == "cpu" and config.cache.kv_cache_dtype == "fp8"
    return E4M3_BITS if is_bits else kv_cache_dtype(config, platform)


def of_draft_model(config: Config) -> Config:
    """Return the settings of a draft model's cache: there are no scales for int8, so it has the model's dtype then."""
    if config.cache.kv_cache_dtype != "int8":
        return config
    return replace(config, cache=replace(config.cache, kv_cache_dtype="auto"))


def num_planned_drafts(config: Config, decoder: DecoderConfig) -> int:
    """Return the most drafted tokens of a row that plans bring for speculative programs: those of prompt lookup for a model with
    recurrent states. 0 for other models, which verify them as rows of decode steps, and if the device drafts."""
    is_lookup = bool(decoder.cache.states) and not config.scheduler.has_drafter
    return config.scheduler.num_speculative_tokens if is_lookup else 0


def kv_specs(config: Config, decoder: DecoderConfig, platform: str) -> tuple[KVSpec, ...]:
    """Return the contents and size of a page of each cache group with pages."""
    return tuple(
        KVSpec(
            num_layers=group.num_layers,
            num_kv_heads=heads[0],
            head_dim=heads[1],
            dtype_bytes=kv_cache_dtype(config, platform).itemsize,
            block_size=page_tokens(platform, config.cache.block_size),
            num_arrays=1 if group.has_vectors else 2,
            window=group.window,
            rate=group.rate,
        )
        for group in decoder.cache.paged
        for heads in (_heads(group, config, platform),)
    )


def _heads(group: CacheGroup, config: Config, platform: str) -> tuple[int, int]:
    """Return the number and the dim of a group's heads as the device lays them out."""
    if group.has_vectors:
        return 1, group.head_dim
    return pool_heads(group.num_kv_heads, group.head_dim, platform, config.parallel.tensor_parallel_size)


def cache_shapes(
    config: Config, decoder: DecoderConfig, policy: DtypePolicy, platform: str, counts: Sequence[int]
) -> CacheShapes:
    """Return the arrays of the cache; counts: pages or state slots of each group."""
    page_size, dtype = page_tokens(platform, config.cache.block_size), pool_dtype(config, platform)
    return tuple(
        group_shapes(
            group,
            count,
            page_size,
            dtype,
            policy.activations,
            _heads(group, config, platform) if group.has_pages else None,
        )
        for group, count in zip(decoder.cache.groups, counts, strict=True)
    )


def make_limits(
    config: Config,
    decoder: DecoderConfig,
    policy: DtypePolicy,
    platform: str,
    kv_bytes: int,
    draft: DraftModel | None = None,
) -> Limits:
    """Return the sizes that `kv_bytes` for the cache (over all devices) allow; raises ConfigError if that is too little.

    draft: the draft model, whose cache groups follow those of `decoder`.
    """
    num_ranks, num_planned = config.parallel.data_parallel_size, num_planned_drafts(config, decoder)
    step = resolve_limits(platform, config.scheduler)
    drafting = None if draft is None else draft.skeleton.config
    cache = _cache_sizes(config, decoder, policy, platform, kv_bytes, drafting)
    num_own = len(decoder.cache.paged)
    spec, states = cache.specs[0], decoder.cache.states
    num_blocks = cache.num_blocks[0] // num_ranks
    max_model_len = fit_model_len(config.model.max_model_len, decoder.max_position, num_blocks, spec)
    # One row makes XLA:CPU convert a weight that is not float32 first, all of it; two do not. On GPUs a layer takes a
    # fifth more kernels with one row (docs/benchmarks/h200-static.md).
    is_float32 = policy.matrices == jnp.float32
    slow_single_row = platform == "gpu" or (platform == "cpu" and not policy.is_native and not is_float32)
    counts = (*cache.num_blocks[:num_own], *(cache.num_state_slots for _ in states))
    shapes = cache_shapes(config, decoder, policy, platform, counts)
    if drafting is not None:
        shapes += cache_shapes(of_draft_model(config), drafting, policy, platform, cache.num_blocks[num_own:])
    return Limits(
        cache=cache,
        shapes=shapes,
        kv_dtype=kv_cache_dtype(config, platform),
        max_model_len=max_model_len,
        max_pages=table_pages(platform, -(-max_model_len // spec.block_size)),
        buckets=make_buckets(
            platform,
            step.max_num_seqs,
            step.max_num_batched_tokens,
            min_decode=2 if slow_single_row else 1,
            growth=4 if policy.is_native else 2,
            num_drafts=num_planned if draft is None else draft.num_drafts,
            plans_have_drafts=num_planned > 0,
        ),
        num_ranks=num_ranks,
    )


def kv_context_bytes(
    config: Config, decoder: DecoderConfig, policy: DtypePolicy, platform: str, draft: DraftModel | None = None
) -> int:
    """Return the bytes of a KV cache, over all devices, that holds a request of the whole context."""
    drafting = None if draft is None else draft.skeleton.config
    specs, slot = _cache_contents(config, decoder, policy, platform, drafting)
    return config.parallel.data_parallel_size * context_bytes(specs, slot, **_cache_use(config, decoder, platform))


def _cache_sizes(
    config: Config,
    decoder: DecoderConfig,
    policy: DtypePolicy,
    platform: str,
    kv_bytes: int,
    draft: DecoderConfig | None = None,
) -> CacheSizes:
    """Return the pages of each group, and the state slots, that `kv_bytes` allow."""
    specs, slot = _cache_contents(config, decoder, policy, platform, draft)
    use, num_ranks = _cache_use(config, decoder, platform), config.parallel.data_parallel_size
    if len(specs) == 1 and not slot:
        num_blocks = num_kv_blocks(kv_bytes // num_ranks, specs[0], use["longest"], use["max_num_seqs"])
        return CacheSizes(specs, (num_blocks,)).of_ranks(num_ranks)
    return divide_cache(kv_bytes // num_ranks, specs, slot, **use).of_ranks(num_ranks)


def _cache_contents(
    config: Config, decoder: DecoderConfig, policy: DtypePolicy, platform: str, draft: DecoderConfig | None
) -> tuple[tuple[KVSpec, ...], int]:
    """Return the pages of each group, and the bytes of a state slot; 0 without states."""
    specs = kv_specs(config, decoder, platform)
    if draft is not None:
        specs += kv_specs(of_draft_model(config), draft, platform)
    return specs, slot_bytes(decoder, policy.activations, axis_rules(decoder, policy.mesh))


def _cache_use(config: Config, decoder: DecoderConfig, platform: str) -> dict[str, int]:
    """Return the longest context, the requests and the prompt tokens of a step that the cache is for."""
    step = resolve_limits(platform, config.scheduler)
    return {
        "longest": pool_context(platform, config.model.max_model_len or decoder.max_position),
        "max_num_seqs": step.max_num_seqs,
        "max_chunk": step.max_num_batched_tokens,
    }
