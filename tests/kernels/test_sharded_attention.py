"""A kernel over the devices of a mesh, with a stand-in for the kernel that says what it was given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxserve_kernels.paged_attention import Paging
from jaxserve_kernels.paged_attention.sharded import Results, ShardAxes, latents_over_mesh, over_mesh
from jaxtyping import Array

TOKENS, GROUP, DIM = 3, 2, 4


def _kernel(
    q: Array, k: Array, v: Array, k_pages: Array, v_pages: Array, layer: Array, paging: Paging, sinks: Array | None
) -> Results:
    """Each query head gets its kv head's key, its sink and the number of heads; the pools get a number per head."""
    mark = k[0, :, 0][:, None, None]
    own = 0.0 if sinks is None else sinks[:, None]
    out = q + jnp.repeat(k, GROUP, 1) + own + 100.0 * k.shape[1]
    return out, k_pages.at[layer].add(mark), v_pages.at[layer].add(-mark)


def _operands(kv_heads: int) -> tuple[Array, ...]:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(TOKENS, kv_heads * GROUP, DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, TOKENS, kv_heads, DIM)).astype(np.float32)
    k_pages, v_pages = rng.normal(size=(2, 2, 5, kv_heads, 16, DIM)).astype(np.float32)
    return *map(jnp.asarray, (q, k, v, k_pages, v_pages)), jnp.int32(1)


def _paging() -> Paging:
    rows = jnp.zeros(TOKENS, jnp.int32)
    return Paging(rows[:, None], rows, jnp.zeros(TOKENS + 1, jnp.int32), rows, rows, None)


@pytest.mark.parametrize(("kv_heads", "num_devices", "heads_of_device"), [(8, 4, 2), (4, 4, 1), (6, 4, 6), (6, 1, 6)])
def test_each_device_has_its_heads(kv_heads: int, num_devices: int, heads_of_device: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",), axis_types=(AxisType.Auto,))
    shards = ShardAxes(("tensor",) if heads_of_device < kv_heads else ())
    operands, sinks = _operands(kv_heads), jnp.arange(kv_heads * GROUP, dtype=jnp.float32)

    @jax.jit
    def shared(*operands: Array) -> Results:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return over_mesh(_kernel, shards)(*operands, _paging(), sinks)

    out, *pools = shared(*jax.device_put(operands, NamedSharding(mesh, PartitionSpec())))
    wanted, *wanted_pools = _kernel(*operands, _paging(), sinks)
    np.testing.assert_allclose(out - 100.0 * heads_of_device, wanted - 100.0 * kv_heads, atol=1e-3)
    np.testing.assert_array_equal(np.stack(pools), np.stack(wanted_pools))


def test_without_a_mesh_the_kernel_is_called_as_it_is() -> None:
    wanted, results = _kernel(*_operands(2), _paging(), None), over_mesh(_kernel, ShardAxes())(*_operands(2), _paging())
    for array, wanted_array in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(array, wanted_array)


@pytest.mark.parametrize(("heads", "pages"), [(("tensor",), ()), ((), ("tensor",)), ((), ())])
def test_each_device_attends_to_latent_vectors_with_its_heads_and_its_pages(
    heads: tuple[str, ...], pages: tuple[str, ...]
) -> None:
    """The stand-in gives every query the number of heads and pages that it was given, and marks the page it wrote."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",), axis_types=(AxisType.Auto,))
    q, latents, pool = jnp.ones((TOKENS, 8, DIM)), jnp.ones((TOKENS, 1, DIM)), jnp.zeros((2, 8, 1, 16, DIM))
    rows = jnp.arange(TOKENS, dtype=jnp.int32)
    own_page = 2 * rows + 1  # of ranks 0, 1 and 2, if each has two
    paging = Paging(own_page[:, None], rows + 1, jnp.arange(TOKENS + 1), own_page, rows, None)

    sinks = jnp.arange(8) / 16

    def kernel(
        q: Array, latents: Array, pages: Array, layer: Array, paging: Paging, sinks: Array | None
    ) -> tuple[Array, Array]:
        assert sinks is not None
        out = q[..., :2] + 100.0 * q.shape[1] + pages.shape[1] + 1000.0 * paging.kv_lengths[:, None, None]
        out = out + sinks[:, None]
        return out, pages.at[layer, paging.pages, 0, paging.slots].set(latents[:, 0])

    @jax.jit
    def shared(*operands: Array) -> tuple[Array, Array]:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return latents_over_mesh(kernel, ShardAxes(heads, pages))(*operands, paging, sinks)

    operands = jax.device_put((q, latents, pool, jnp.int32(1)), NamedSharding(mesh, PartitionSpec()))
    out, written = shared(*operands)
    own = 1.0 + 100.0 * (2 if heads else 8) + (2 if pages else 8) + 1000.0 * (np.arange(TOKENS) + 1)
    if pages:
        assert out.shape == (4, TOKENS, 8, 2)
        np.testing.assert_array_equal(np.asarray(out[:3] != 0).all((2, 3)), np.eye(3, dtype=bool))
        out = out.sum(0)
    np.testing.assert_array_equal(
        np.asarray(out), np.broadcast_to(own[:, None, None] + np.asarray(sinks)[:, None], out.shape)
    )
    expected = np.zeros(pool.shape)
    expected[1, own_page, 0, rows] = 1.0
    first_pages = slice(1, None, 2)  # the others are ranks' null pages
    np.testing.assert_array_equal(np.asarray(written)[:, first_pages], expected[:, first_pages])
