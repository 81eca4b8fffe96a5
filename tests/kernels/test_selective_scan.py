"""The selective scan in a loop over layers: states are updated in their pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.segments import cut_segments, decode_segments
from jaxserve_kernels.selective_scan import Scanned, selective_scan
from jaxserve_kernels.states import PooledStates

NUM_LAYERS, NUM_SLOTS, STATE_DIM, NUM_CHANNELS = 3, 64, 16, 128


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (2, 2), (1, 40)])
def test_layers_copy_no_pool(backend: Backend, num_rows: int, num_tokens: int) -> None:
    def layers(
        pool: jax.Array, x: jax.Array, b: jax.Array, starts: jax.Array, slots: jax.Array
    ) -> tuple[jax.Array, ...]:
        segments = decode_segments(starts)
        if num_tokens > num_rows:
            segments = cut_segments(starts, jnp.zeros_like(slots), jnp.int32(0), num_tokens=num_tokens)
        for layer in range(NUM_LAYERS):
            states = PooledStates(pool, layer, slots, slots)
            x, after = selective_scan(
                Scanned(x, x * x, b, b), -(b[0][:, None] ** 2) - x[0], states, segments, backend=backend
            )
            assert isinstance(after, PooledStates)
            pool = after.pool
        return pool, x

    pool = jax.ShapeDtypeStruct((NUM_LAYERS, NUM_SLOTS, STATE_DIM, NUM_CHANNELS), jnp.float32)
    x, b = (jax.ShapeDtypeStruct((num_tokens, width), jnp.float32) for width in (NUM_CHANNELS, STATE_DIM))
    starts, slots = (jax.ShapeDtypeStruct((count,), jnp.int32) for count in (num_rows + 1, num_rows))
    compiled = jax.jit(layers, donate_argnums=0).lower(pool, x, b, starts, slots).compile()
    assert f"= f32[{','.join(map(str, pool.shape))}]{{3,2,1,0}} copy(" not in compiled.as_text()
