"""The random numbers of a draw are those of `jax.random`, to the bit."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.sampling.threefry import uniforms

LOWEST, LARGEST = -(2**31), 2**31 - 1


def test_draws_have_the_bits_of_jax_random_for_any_seed_and_position() -> None:
    edges = [0, 1, -1, LOWEST, LARGEST]
    more = np.random.default_rng(0).integers(LOWEST, LARGEST, (2, 200), np.int32)
    seeds, positions = np.concatenate([np.stack(np.meshgrid(edges, edges)).reshape(2, -1).astype(np.int32), more], 1)

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position), (3,))

    expected = np.asarray(jax.vmap(draw)(seeds, positions)).T
    found = np.asarray(uniforms(seeds, positions, 3))
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()
    assert found.min() >= 0 and found.max() < 1
