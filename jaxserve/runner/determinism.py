"""`--deterministic`: the configurations in which a reply has the same bits whatever else runs."""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.matmul import takes_inputs
from jaxserve_kernels.paged_attention import Scoring, is_native

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.decoder import DecoderConfig, head_counts
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.quant.array import QuantArray
from jaxserve.runner.limits import cache_shapes

_FORMATS: Final = frozenset({"none", "int8", "mxfp4-weight-only", "nvfp4-weight-only"})
"""Formats whose matmuls were compared bit by bit among batches of all sizes."""


def check_deterministic(config: Config, skeleton: ModelSkeleton | EncoderSkeleton) -> None:
    """Raise ConfigError if `--deterministic` is set and this engine's steps may round a row by its neighbours."""
    if config.compile.deterministic and (reason := _obstacle(config, skeleton)) is not None:
        raise ConfigError(f"--deterministic: {reason}")


def _obstacle(config: Config, skeleton: ModelSkeleton | EncoderSkeleton) -> str | None:
    """Return the reason why replies may differ with what else runs; None if they do not."""
    model, policy = skeleton.config, skeleton.policy
    if policy.backend not in NATIVE:
        return "only with the native kernels of one CPU device: the matmuls of XLA round a row by the number of rows"
    name = policy.quant.name
    if name not in _FORMATS or not policy.is_native:
        known = "none with float32, int8, mxfp4-weight-only or nvfp4-weight-only"
        return f"not with {policy.matrices} weights of --quantization {name}; use {known}"
    if not isinstance(model, DecoderConfig) or model.is_bidirectional or model.head is not None:
        return "only for models that generate"
    if model.compressed is not None or any(
        layer.recurrent is not None or layer.latent_dim is not None for layer in model.layers
    ):
        return "not with recurrent layers, latent attention or compressed blocks, which were not tested"
    if policy.attention_backend not in NATIVE:
        return "not with indexers, whose attention XLA computes"
    return _xla_attention(config, model, policy) or _xla_matmul(skeleton)


def _xla_attention(config: Config, model: DecoderConfig, policy: DtypePolicy) -> str | None:
    """Return why XLA computes the attention of a layer; None if the native kernel does."""
    if model.attention_softcap is not None:
        return f"not with attention_softcap (here {model.attention_softcap:g}), which the native attention kernel lacks"
    scoring = Scoring(scale=1.0)
    for group in cache_shapes(config, model, policy, "cpu", [1] * len(model.cache.groups)):
        array = group.arrays[0]
        num_heads = max(head_counts(model))
        if not is_native(num_heads, array.shape, jnp.dtype(array.dtype), scoring):
            _, _, kv_heads, page_size, dim = array.shape
            return (
                f"not with {num_heads} heads, {kv_heads} KV heads of {dim} numbers and pages of {page_size} tokens: the native "
                "attention kernel takes multiples of 16 numbers and tokens, and up to 48 heads for each KV head"
            )
    return None


def _xla_matmul(skeleton: ModelSkeleton | EncoderSkeleton) -> str | None:
    """Return which matrix XLA multiplies with; None if native kernels multiply with all."""
    for leaf in skeleton.leaves:
        if not isinstance(leaf.declared, QuantArray):
            continue
        is_int8, num_inputs = leaf.declared.format.quantizes_activations, leaf.shape[-1]
        if not takes_inputs(num_inputs, dynamic=is_int8):
            limit = "multiples of 64 up to 65536 with --quantization int8" if is_int8 else "multiples of 16"
            return f"not with the {num_inputs} inputs of {leaf.name}: the native matmul kernels take {limit}"
    return None
