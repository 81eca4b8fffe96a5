"""Angles of the rotary position embedding (Su et al., arXiv 2104.09864) and their scalings."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.rope import Rotation
from jaxtyping import Array, Int

from jaxserve.models.config import DecoderConfig, RopeScaling


def rotation(config: DecoderConfig, positions: Int[Array, "T"]) -> Rotation:
    """Angles in float32: bfloat16 would round position 257 to 256."""
    frequencies, attention_factor = inverse_frequencies(config)
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(frequencies)  # (T, H/2)
    return Rotation(jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor)


def inverse_frequencies(config: DecoderConfig) -> tuple[np.ndarray, float]:
    """The H/2 inverse frequencies (float32) and the factor on cosine and sine."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return _base(config.rope_theta, config.head_dim), 1.0
    if scaling.kind == "linear":
        return _base(config.rope_theta, config.head_dim) / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3(config, scaling), 1.0
    return _yarn(config, scaling)


def _base(theta: float, dim: int) -> np.ndarray:
    return (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)


def _llama3(config: DecoderConfig, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    assert low and high and original, "a family resolves every llama3 field"
    frequencies = _base(config.rope_theta, config.head_dim).astype(np.float64)
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def _yarn(config: DecoderConfig, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): NTK-by-parts between `beta_fast` and `beta_slow` rotations."""
    dim, theta = config.head_dim, config.rope_theta
    original, attention_factor = scaling.original_max_position, scaling.attention_factor
    fast, slow = scaling.beta_fast, scaling.beta_slow
    assert original and attention_factor and fast and slow, "a family resolves every yarn field"

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(fast)), 0)
    high = min(math.ceil(dimension_of(slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    kept = _base(theta, dim).astype(np.float64)
    frequencies = kept / scaling.factor * ramp + kept * (1 - ramp)
    return frequencies.astype(np.float32), attention_factor
