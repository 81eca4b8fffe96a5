"""Angles of the rotary position embedding (RoPE, Su et al., arXiv 2104.09864) and their scalings."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.rope import Rotation
from jaxtyping import Array, Float, Int

from jaxserve.layers.param import parameter
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.rope import RopeScaling
from jaxserve.model_config.vision import SectionLayout


class LearnedFrequencies(nnx.Module):
    """Rotary frequencies times learned factors, which the checkpoint has as logarithms."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.alpha = parameter((_rotary_dim(config) // 2,), (None,), jnp.dtype(jnp.float32))

    def __call__(self, positions: Int[Array, "T"]) -> Rotation:
        """Return the rotation of tokens at these positions."""
        frequencies, factor = inverse_frequencies(self.config)
        return _rotation(frequencies * jnp.exp(self.alpha[...]), factor, positions[:, None], self.config.full_head_dim)


def rotation(config: DecoderConfig, positions: Int[Array, "*3 T"]) -> Rotation:
    """Return cosines and sines in float32: bfloat16 would round position 257 to 256.

    positions: (T,), or (3, T) for a model with sections: the position of each token in time, rows and columns.
    """
    frequencies, factor = inverse_frequencies(config)
    if positions.ndim == 1:
        return _rotation(frequencies, factor, positions[:, None], config.full_head_dim)
    assert config.vision is not None and config.vision.mrope_sections is not None, "a model with three positions"
    axes = _section_axes(config.vision.mrope_sections, config.vision.mrope_layout, len(frequencies))
    return _rotation(frequencies, factor, positions[axes].T, config.full_head_dim)


def _section_axes(sections: tuple[int, int, int], layout: SectionLayout, num_frequencies: int) -> np.ndarray:
    """Return which position turns each frequency: see `SectionLayout`.

    Interleaved rows and columns stop after their sections' numbers of frequencies; time has all others.
    """
    if layout == "chunks":
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    axes = np.zeros(num_frequencies, np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def sliding_rotation(config: DecoderConfig, positions: Int[Array, "T"]) -> Rotation | None:
    """Return the rotation of sliding-window layers; None if it is that of the others."""
    if config.sliding_rope_theta is None:
        return None
    rotary_dim = config.sliding_rotary_dim or config.rotary_dim or config.head_dim
    return _rotation(_base(config.sliding_rope_theta, rotary_dim), 1.0, positions[:, None], config.head_dim)


def plain_rotation(theta: float, head_dim: int, positions: Int[Array, "T"]) -> Rotation:
    """Return the rotation of whole heads with frequencies that are not scaled."""
    return _rotation(_base(theta, head_dim), 1.0, positions[:, None], head_dim)


def query_scales(config: DecoderConfig, positions: Int[Array, "T"]) -> Float[Array, "T"] | None:
    """Return the factor on each token's queries in float32; None if positions do not scale them."""
    scaling = config.query_scaling
    if scaling is None:
        return None
    return 1 + scaling.slope * jnp.log1p(((positions + scaling.offset) // scaling.period).astype(jnp.float32))


def row_order(config: DecoderConfig, *, is_sliding: bool = False) -> np.ndarray | None:
    """Return the checkpoint's index of each dimension of a head in our order; None if the orders are the same.

    is_sliding: True for heads of layers with a window.

    Kernels rotate dimension i with i + H / 2 in every model. Pairs that rotate come first, the other dimensions after
    them. Scores do not change, because queries and keys are reordered alike.
    """
    own = config.sliding_rotary_dim if is_sliding else None
    head_dim, rotary_dim = config.full_head_dim, own or _rotary_dim(config)
    if (
        config.latent is not None
        or config.compressed is not None
        or (config.rotary_pairs == "halves" and rotary_dim == head_dim)
    ):
        return None  # attention to vectors reorders queries and keys while it computes them
    turning = np.arange(rotary_dim)
    pairs = turning.reshape(-1, 2).T if config.rotary_pairs == "adjacent" else turning.reshape(2, -1)
    if config.rotary_pairs == "swapped_halves":
        pairs = pairs[::-1]
    return np.concatenate([pairs, np.arange(rotary_dim, head_dim).reshape(2, -1)], axis=1).ravel()


def _rotary_dim(config: DecoderConfig) -> int:
    return config.full_head_dim if config.rotary_dim is None else config.rotary_dim


def _rotation(frequencies: np.ndarray | Array, factor: float, positions: Int[Array, "T _"], head_dim: int) -> Rotation:
    angles = positions.astype(jnp.float32) * jnp.asarray(frequencies)  # (T, R/2)
    still = ((0, 0), (0, head_dim // 2 - len(frequencies)))
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    return Rotation(jnp.pad(cos, still, constant_values=1), jnp.pad(sin, still))  # (T, H/2)


def inverse_frequencies(config: DecoderConfig) -> tuple[np.ndarray, float]:
    """The R/2 inverse frequencies (float32) and the factor on cosine and sine."""
    scaling = config.rope_scaling
    base = _base(config.rope_theta, _rotary_dim(config))
    if scaling is None or scaling.kind == "dynamic":
        return base, 1.0
    if scaling.kind == "linear":
        return base / np.float32(scaling.factor), 1.0
    if scaling.kind == "proportional":
        return base[: scaling.num_pairs] / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.kind == "longrope":
        return _longrope(config, base, scaling)
    return _yarn(config, base, scaling)


def _base(theta: float, dim: int) -> np.ndarray:
    return (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)).astype(np.float32)


def _longrope(config: DecoderConfig, base: np.ndarray, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv 2402.13753): every frequency has a divisor, another one where contexts are long."""
    original, attention_factor = scaling.original_max_position, scaling.attention_factor
    assert original and attention_factor, "a family resolves every longrope field"
    divisors = scaling.long_divisors if config.max_position > original else scaling.short_divisors
    return base / np.asarray(divisors, np.float32), attention_factor


def _llama3(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position
    assert low and high and original, "a family resolves every llama3 field"
    frequencies = base.astype(np.float64)
    wavelengths = 2 * np.pi / frequencies
    turns = original / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns > low).astype(np.float64)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def _yarn(config: DecoderConfig, base: np.ndarray, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): NTK-by-parts between `beta_fast` and `beta_slow` rotations."""
    dim, theta = 2 * len(base), config.rope_theta
    original, attention_factor = scaling.original_max_position, scaling.attention_factor
    fast, slow = scaling.beta_fast, scaling.beta_slow
    assert original and attention_factor and fast and slow, "a family resolves every yarn field"

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(fast), dimension_of(slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    kept = base.astype(np.float64)
    frequencies = kept / scaling.factor * ramp + kept * (1 - ramp)
    return frequencies.astype(np.float32), attention_factor
