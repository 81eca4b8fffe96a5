"""With native kernels a token's bits do not depend on the other tokens of its step, in the parts that XLA adds up."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.models.blocks.altup import mixtures

pytestmark = [pytest.mark.slow, pytest.mark.optimized, pytest.mark.versions]


@pytest.mark.parametrize("width", [16, 2048])
def test_mixtures_of_streams_are_alike_among_any_number_of_tokens(width: int) -> None:
    """XLA adds the four streams in another order in arrays of fewer than 4,096 numbers."""
    random = np.random.default_rng(5)
    streams = random.standard_normal((4, 64, width), np.float32)
    coefs = random.standard_normal((64, 4, 4), np.float32)
    mix = jax.jit(partial(mixtures, is_alike=True))
    whole = np.asarray(mix(streams, coefs))
    np.testing.assert_allclose(whole, np.einsum("tab,btd->atd", coefs, streams), atol=1e-5)
    for count in (1, 3, 8):
        np.testing.assert_array_equal(mix(streams[:, :count], coefs[:count]), whole[:, :count])
