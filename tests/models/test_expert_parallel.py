"""The exchange of rows between experts' devices, against the example and the definition of `jax.lax.ragged_all_to_all`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxserve.layers.expert_parallel import send, uses_all_to_all


def test_rows_arrive_where_their_sender_says() -> None:
    """The example in JAX's documentation of the collective."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("expert",), axis_types=(AxisType.Auto,))
    rows = jnp.array([[1.0], [2.0], [2.0], [3.0], [4.0], [0.0]])
    slices = [[0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], [1, 1, 2, 1]]  # of both devices

    def exchange(rows: jax.Array, *slices: jax.Array) -> jax.Array:
        return send(rows, jnp.zeros((4, 1), rows.dtype), slices, ("expert",))  # type: ignore[arg-type]

    spec = PartitionSpec("expert")
    with jax.set_mesh(mesh):
        mapped = jax.jit(jax.shard_map(exchange, in_specs=(spec,) * 5, out_specs=spec, check_vma=False))
        found = mapped(rows, *map(jnp.asarray, slices))
    assert found.ravel().tolist() == [1, 3, 0, 0, 2, 2, 4, 0]


@pytest.mark.parametrize(
    ("exchange", "num_tokens", "num_per_token", "num_groups", "expected"),
    [
        ("auto", 2048, 8, 16, False),  # as many bytes: one collective instead of three
        ("auto", 2048, 8, 32, True),
        ("auto", 2048, 2, 8, True),
        ("auto", 4, 2, 8, False),  # tokens do not divide
        ("all-to-all", 2048, 8, 2, True),
        ("all-reduce", 2048, 1, 64, False),
    ],
)
def test_rows_are_sent_if_that_moves_fewer_bytes(
    exchange: str, num_tokens: int, num_per_token: int, num_groups: int, expected: bool
) -> None:
    assert uses_all_to_all(exchange, num_tokens, num_per_token, num_groups) == expected  # type: ignore[arg-type]
