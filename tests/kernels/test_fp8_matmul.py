"""The reference matmul of 8-bit weights, against numpy on the same rounded values and against float32."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.matmul import matmul, quantize_rows

E4M3 = ml_dtypes.float8_e4m3fn
NUM_TOKENS, NUM_IN, NUM_OUT = 9, 192, 70


def operands(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Activations with an empty row and an outlier, e4m3 weights, their scales."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((NUM_TOKENS, NUM_IN)).astype(np.float32)
    x[3], x[5, 7] = 0, 300
    return (
        x,
        random.uniform(-448, 448, (NUM_OUT, NUM_IN)).astype(E4M3),
        random.uniform(1e-3, 1e-2, NUM_OUT).astype(np.float32),
    )


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_e4m3_weights_are_widened_without_loss(dtype: str, backend: Backend) -> None:
    x, weight, scales = operands(0)
    x = x.astype(getattr(ml_dtypes, dtype, dtype))
    expected = x.astype(np.float64) @ (weight.astype(np.float64) * scales[:, None]).T
    found = matmul(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scales), backend=backend)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_dynamic_matmul_is_that_of_activations_rounded_token_by_token(backend: Backend) -> None:
    x, weight, scales = operands(1)
    row_scales = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-30) / np.float32(448)
    rounded = (x / row_scales).astype(E4M3).astype(np.float64) * row_scales
    expected = rounded @ (weight.astype(np.float64) * scales[:, None]).T
    found = np.asarray(matmul(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(scales), dynamic=True, backend=backend))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert not found[3].any()


def test_dynamic_matmul_stays_within_the_format_of_the_whole_one() -> None:
    """Rounding to four significant bits is wrong by 1.8 % on the average of a token's values, so are their sums."""
    x, weight, scales = operands(2)
    arrays = [jnp.asarray(array) for array in (x, weight, scales)]
    whole, rounded = np.asarray(matmul(*arrays)), np.asarray(matmul(*arrays, dynamic=True))
    rows = [row for row in range(NUM_TOKENS) if row not in (3, 5)]
    errors = np.linalg.norm(rounded - whole, axis=1)[rows] / np.linalg.norm(whole, axis=1)[rows]
    assert 0.005 < errors.max() < 0.04


def test_rows_take_the_whole_range_of_e4m3() -> None:
    x = operands(3)[0]
    values, scales = quantize_rows(jnp.asarray(x), jnp.float8_e4m3fn)
    assert values.dtype == jnp.float8_e4m3fn
    largest = np.abs(np.asarray(values).astype(np.float32)).max(axis=1)
    assert largest.tolist() == [0 if row == 3 else 448 for row in range(NUM_TOKENS)]
    np.testing.assert_allclose(
        values.astype(jnp.float32) * scales[:, None], x, rtol=1 / 16, atol=2e-3 * np.abs(x).max()
    )
