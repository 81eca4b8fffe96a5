"""What follows from settings, model, platform and memory: dtypes, KV pages, context length, step shapes.

Pure arithmetic, so that a plan for a device that is not there and the server that later runs on it agree.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.matmul import multiplies
from jaxserve_kernels.paged_attention import pool_head_dim

from jaxserve.config import Config, WeightFormat
from jaxserve.errors import ConfigError
from jaxserve.kv.spec import KVSpec
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.runner.backend import Chip, choose_backend, choose_encoder_backend
from jaxserve.runner.buckets import make_buckets, resolve_limits
from jaxserve.runner.memory import fit_model_len, num_kv_blocks
from jaxserve.scheduler.plan import Buckets

_LOG = logging.getLogger(__name__)
_ADA = (8, 9)
"""The first CUDA devices with arithmetic for 8-bit floats."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of one engine."""

    spec: KVSpec
    kv_dtype: jnp.dtype
    num_blocks: int
    max_model_len: int
    buckets: Buckets

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """`[L, P, K, S, H]`"""
        spec = self.spec
        return (spec.num_layers, self.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)

    @property
    def max_pages(self) -> int:
        return -(-self.max_model_len // self.spec.block_size)

    @property
    def summary(self) -> str:
        """What the settings left open, under their names."""
        return (
            f"max_num_seqs={self.buckets.max_num_seqs} max_num_batched_tokens={max(self.buckets.mixed)} "
            f"max_model_len={self.max_model_len} num_kv_blocks={self.num_blocks}"
        )


def weights_dtype(config: Config, platform: str) -> jnp.dtype:
    """auto: float32 on CPUs, which compute it faster than bfloat16 unless they have AVX512-BF16 or AMX."""
    name = config.model.dtype
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_policy(config: Config, decoder: DecoderConfig, chip: Chip) -> DtypePolicy:
    """CPUs compute activations in float32 whatever the weights are stored in. Raises ConfigError."""
    weights, activations = weights_dtype(config, chip.platform), _activations(config, chip)
    backend = choose_backend(config, decoder, chip, activations, kv_cache_dtype(config, chip.platform))
    quantization = weight_format(config, decoder)
    for note in quantization_notes(config, decoder, chip):
        _LOG.info(note)
    policy = DtypePolicy(
        weights,
        activations,
        quantization,
        backend,
        fused_for=_fused_for(config, chip),
        num_devices=config.parallel.tensor_parallel_size,
        four_bits=_four_bits(chip),
    )
    stored = decoder.stored
    if stored is None or stored.format != quantization:
        return policy
    return replace(
        policy,
        plain_matrices=stored.plain_matrices if config.model.quantization == "auto" else (),
        group_size=stored.group_size or policy.group_size,
        has_offsets=stored.has_offsets,
    )


def make_encoder_policy(config: Config, chip: Chip) -> DtypePolicy:
    """The same for an encoder, which is never stored quantised."""
    wanted = config.model.quantization
    return DtypePolicy(
        weights_dtype(config, chip.platform),
        _activations(config, chip),
        "none" if wanted == "auto" else wanted,
        choose_encoder_backend(config, chip),
        fused_for=_fused_for(config, chip),
        num_devices=config.parallel.tensor_parallel_size,
        four_bits=_four_bits(chip),
    )


def _fused_for(config: Config, chip: Chip) -> int:
    """GPUs start less and compute larger products where they are joined; a CPU would only copy their results."""
    return config.parallel.tensor_parallel_size if chip.platform == "gpu" else 0


def _four_bits(chip: Chip) -> jnp.dtype:
    """jax 0.10 has no layout for int4 on CPUs that its compiled programs would take."""
    return jnp.dtype("int8" if chip.platform == "cpu" else "int4")


def _activations(config: Config, chip: Chip) -> jnp.dtype:
    return jnp.dtype("float32") if chip.platform == "cpu" else weights_dtype(config, chip.platform)


def weight_format(config: Config, decoder: DecoderConfig) -> WeightFormat:
    """What matrices are quantised to. auto: what they are stored in, where its scales lie as a format's."""
    if config.model.quantization != "auto":
        return config.model.quantization
    return "none" if decoder.stored is None else decoder.stored.format


def quantization_notes(config: Config, decoder: DecoderConfig, chip: Chip) -> list[str]:
    """What a user of small weights should know of this model on this device."""
    notes, chosen = [], weight_format(config, decoder)
    if config.model.quantization == "auto" and decoder.stored is not None and decoder.stored.note is not None:
        notes.append(decoder.stored.note)
    is_wide = chip.platform == "cpu" or (chip.capability is not None and chip.capability < _ADA)
    if is_wide and chosen.startswith("fp8"):
        notes.append(
            "fp8 weights save memory here but no time: this device has no arithmetic for them, every step widens them "
            "first; --quantization none does it once"
        )
    if chip.platform == "cpu" and chosen.startswith("int4"):
        notes.append(
            "4-bit weights take 8 here, and no less time: every step widens them first; --quantization "
            "int8-weight-only is as small and has a kernel of its own"
        )
    return notes


def context_notes(config: Config, decoder: DecoderConfig) -> list[str]:
    """What a user should know of a context that the model would stretch if asked to."""
    served = decoder.with_context(config.model.max_model_len)
    if config.model.max_model_len is not None or served.max_position == decoder.max_position:
        return []
    return [
        f"the model's context is {served.max_position:,} tokens as it is; --max-model-len asks for up to "
        f"{decoder.max_position:,}, for which it stretches the angles of short texts too"
    ]


def kv_cache_dtype(config: Config, platform: str) -> jnp.dtype:
    """XLA:CPU before jax 0.12 converts a whole pool that is not float32 to float32 and back for every write."""
    is_fp8 = config.cache.kv_cache_dtype == "fp8"
    if platform == "cpu":
        if is_fp8:
            raise ConfigError("--kv-cache-dtype fp8: only on GPUs and TPUs")
        return jnp.dtype("float32")
    return jnp.dtype("float8_e4m3fn") if is_fp8 else weights_dtype(config, platform)


def kv_spec(config: Config, decoder: DecoderConfig, platform: str) -> KVSpec:
    """What a page of the KV cache holds."""
    return KVSpec(
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=pool_head_dim(decoder.head_dim, platform),
        dtype_bytes=kv_cache_dtype(config, platform).itemsize,
        block_size=config.cache.block_size,
    )


def make_limits(config: Config, decoder: DecoderConfig, policy: DtypePolicy, platform: str, kv_bytes: int) -> Limits:
    """The sizes that `kv_bytes` for the KV cache (over all devices) allow; raises ConfigError where that is too little."""
    spec = kv_spec(config, decoder, platform)
    longest = config.model.max_model_len or decoder.max_position
    step = resolve_limits(platform, config.scheduler)
    num_blocks = num_kv_blocks(kv_bytes, spec, longest, step.max_num_seqs)
    # One row makes XLA:CPU convert a weight that is not float32 first, all of it; two do not. On GPUs a layer takes a
    # fifth more kernels with one row (docs/benchmarks/h200-static.md).
    is_float32 = policy.weights == jnp.float32 and not policy.is_quantized
    is_native = policy.backend in NATIVE and multiplies(policy.matrices, dynamic=policy.is_dynamic)
    slow_single_row = platform == "gpu" or (platform == "cpu" and not is_native and not is_float32)
    return Limits(
        spec=spec,
        kv_dtype=kv_cache_dtype(config, platform),
        num_blocks=num_blocks,
        max_model_len=fit_model_len(config.model.max_model_len, decoder.max_position, num_blocks, spec),
        buckets=make_buckets(
            platform,
            step.max_num_seqs,
            step.max_num_batched_tokens,
            min_decode=2 if slow_single_row else 1,
            growth=4 if is_native else 2,
        ),
    )
