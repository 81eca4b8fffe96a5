"""Matmuls in the dtype of their inputs, against numpy in float64 and against float32 results that are rounded afterwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxserve_kernels.matmul import matmul

NUM_IN, NUM_OUT = 192, 40


def operands(num_tokens: int, dtype: str, weights: str) -> tuple[jax.Array, jax.Array]:
    random = np.random.default_rng(num_tokens)
    x = random.standard_normal((num_tokens, NUM_IN)).astype(getattr(ml_dtypes, dtype, dtype))
    return jnp.asarray(x), jnp.asarray(
        random.standard_normal((NUM_OUT, NUM_IN)).astype(getattr(ml_dtypes, weights, weights))
    )


@pytest.mark.parametrize("num_tokens", [5, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_are_float32_and_rounded_once(dtype: str, num_tokens: int) -> None:
    x, weight = operands(num_tokens, dtype, dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    found = matmul(x, weight, dtype=x.dtype)
    assert found.dtype == x.dtype
    half_a_digit = float(jnp.finfo(x.dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1.01 * half_a_digit, atol=2e-5)


@pytest.mark.parametrize(("dtype", "weights"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_result_is_that_of_a_float32_matmul_rounded_afterwards(dtype: str, weights: str) -> None:
    x, weight = operands(1024, dtype, weights)
    expected = matmul(x, weight).astype(x.dtype)
    found = matmul(x, weight, dtype=x.dtype)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("num_tokens", "is_whole"), [(512, False), (1024, True)])
def test_the_matmul_of_many_tokens_is_never_float32(num_tokens: int, is_whole: bool) -> None:
    """A library cuts the inputs of few tokens into parts, whose sums it may round."""
    x, weight = operands(num_tokens, "bfloat16", "bfloat16")
    text = str(jax.make_jaxpr(lambda *given: matmul(*given, backend="mosaic_gpu", dtype=x.dtype))(x, weight))
    assert ("preferred_element_type=bfloat16" in text) == is_whole
