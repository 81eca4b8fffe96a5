"""Tiles of tokens for the kernel over latent vectors: every token is in one, with the keys that it sees."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.latent_attention.gpu.query_tiles import make_query_tiles, num_tiles, tile_size

NUM_HEADS = 16
STEPS = (
    ((1, 1, 1), (5, 77, 0), 0),
    ((4, 1, 3, 0), (9, 1, 130, 0), 3),
    ((2, 9, 30), (2, 40, 30), 1),
    ((1, 5), (8, 0), 0),
)


def test_tiles_fill_the_rows_of_a_matmul_unless_rows_have_fewer_tokens() -> None:
    sizes = [tile_size(64, 16, heads) for heads in (1, 5, 16, 20, 40, 128)]
    assert sizes == [4, 4, 4, 3, 1, 1]
    assert [tile_size(tokens, 16, 4) for tokens in (16, 17, 512)] == [1, 2, 16]


@pytest.mark.parametrize(("counts", "lengths", "padding"), STEPS)
def test_every_token_is_in_a_tile_that_ends_with_the_keys_of_its_last_token(
    counts: tuple[int, ...], lengths: tuple[int, ...], padding: int
) -> None:
    starts, num_tokens = np.concatenate(([0], np.cumsum(counts))), sum(counts) + padding
    segments = make_query_tiles(jnp.asarray(starts), jnp.asarray(lengths), num_tokens, NUM_HEADS)
    rows, firsts, tokens, ends = map(np.asarray, segments.tiles)
    assert len(rows) == num_tiles(num_tokens, len(counts), segments.size)
    seen = {}
    for row, first, count, end in zip(rows, firsts, tokens, ends, strict=True):
        assert count <= segments.size
        seen |= {first + i: (row, end - (count - 1 - i)) for i in range(count)}
    wanted = {
        starts[row] + i: (row, length - count + i + 1)
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True))
        for i in range(count if length else 0)
    }
    assert seen == wanted
    assert tokens.sum() == len(wanted)


@pytest.mark.parametrize(("counts", "lengths", "padding"), STEPS)
def test_results_return_to_their_tokens(counts: tuple[int, ...], lengths: tuple[int, ...], padding: int) -> None:
    starts, num_tokens = np.concatenate(([0], np.cumsum(counts))), sum(counts) + padding
    segments = make_query_tiles(jnp.asarray(starts), jnp.asarray(lengths), num_tokens, NUM_HEADS)
    q = jnp.arange(num_tokens * NUM_HEADS * 2.0).reshape(num_tokens, NUM_HEADS, 2)
    found = segments.put_together(segments.cut(q), NUM_HEADS)
    np.testing.assert_array_equal(found[: starts[-1]], q[: starts[-1]])
    assert np.isfinite(np.asarray(found)).all()
