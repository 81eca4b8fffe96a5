"""What follows from settings, model, platform and memory: dtypes, KV pages, context length, step shapes.

Pure arithmetic, so that a plan for a device that is not there and the server that later runs on it agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxserve_kernels.matmul import multiplies_int8
from jaxserve_kernels.paged_attention import pool_head_dim

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.kv.spec import KVSpec
from jaxserve.layers.numerics import Numerics
from jaxserve.models.config import DecoderConfig
from jaxserve.runner.backend import Chip, choose_backend, choose_encoder_backend
from jaxserve.runner.buckets import make_buckets, resolve_limits
from jaxserve.runner.memory import fit_model_len, num_kv_blocks
from jaxserve.scheduler.plan import Buckets


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


def make_numerics(config: Config, decoder: DecoderConfig, chip: Chip) -> Numerics:
    """CPUs compute activations in float32 whatever the weights are stored in. Raises ConfigError."""
    weights = weights_dtype(config, chip.platform)
    activations = jnp.dtype("float32") if chip.platform == "cpu" else weights
    backend = choose_backend(config, decoder, chip, activations, kv_cache_dtype(config, chip.platform))
    return Numerics(weights, activations, config.model.quantization, backend)


def make_encoder_numerics(config: Config, chip: Chip) -> Numerics:
    """The same for an encoder."""
    weights = weights_dtype(config, chip.platform)
    activations = jnp.dtype("float32") if chip.platform == "cpu" else weights
    return Numerics(weights, activations, config.model.quantization, choose_encoder_backend(config, chip))


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


def make_limits(config: Config, decoder: DecoderConfig, numerics: Numerics, platform: str, kv_bytes: int) -> Limits:
    """The sizes that `kv_bytes` for the KV cache (over all devices) allow; raises ConfigError where that is too little."""
    spec = kv_spec(config, decoder, platform)
    longest = config.model.max_model_len or decoder.max_position
    step = resolve_limits(platform, config.scheduler)
    num_blocks = num_kv_blocks(kv_bytes, spec, longest, step.max_num_seqs)
    # One row makes XLA:CPU convert a weight that is not float32 first, all of it; two do not.
    is_float32 = numerics.weights == jnp.float32 and not numerics.is_int8
    is_by_xla = numerics.backend != "native" or (numerics.quantization == "int8" and not multiplies_int8())
    slow_single_row = platform == "cpu" and is_by_xla and not is_float32
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
            growth=2 if is_by_xla else 4,
        ),
    )
