"""Norms on CPUs: with native kernels, a row's bits do not depend on other rows."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.policy import plain


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.versions
@pytest.mark.parametrize("shape", [(576,), (1536,), (9, 64), (1, 128)])
def test_a_row_is_normalised_to_the_same_bits_among_any_number_of_rows(shape: tuple[int, ...]) -> None:
    """XLA alone sums few rows in another order, which 8-bit activations amplify."""
    policy = replace(plain(jnp.dtype("float32")), backend="native")
    norm = RMSNorm(shape[-1], 1e-5, policy)
    random = np.random.default_rng(4)
    norm.weight[...] = jnp.asarray(random.standard_normal(shape[-1], np.float32))
    rows = random.standard_normal((64, *shape), np.float32)
    whole = np.asarray(jax.jit(norm)(rows))
    for count in (1, 2, 3, 4, 8, 16, 32):
        np.testing.assert_array_equal(jax.jit(norm)(rows[:count]), whole[:count])
    mean = np.square(rows.astype(np.float64)).mean(-1, keepdims=True)
    np.testing.assert_allclose(whole, np.asarray(norm.weight[...]) * rows / np.sqrt(mean + 1e-5), atol=1e-5)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.versions
def test_a_row_of_layer_norm_has_the_same_bits_among_any_number_of_rows() -> None:
    policy = replace(plain(jnp.dtype("float32")), backend="native")
    norm = LayerNorm(576, 1e-5, policy, is_alike=True)
    random = np.random.default_rng(4)
    assert norm.bias is not None
    norm.weight[...], norm.bias[...] = (jnp.asarray(random.standard_normal(576, np.float32)) for _ in range(2))
    rows = random.standard_normal((64, 576), np.float32)
    whole = np.asarray(jax.jit(norm)(rows))
    for count in (1, 6):
        np.testing.assert_array_equal(jax.jit(norm)(rows[:count]), whole[:count])
