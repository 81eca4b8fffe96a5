"""Sparse attention at the sizes of DeepSeek-V3.2: memory that does not grow with tokens times context times heads."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jaxserve_kernels.sparse_attention import cases, selection

from tests.kernels.sparse_steps import DONATED, KEY_WIDTH, POOL, WIDTH, operands, sparse_step


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rows", "most_mib"), [(512, 4, 128), (64, 64, 80)])
def test_scores_of_long_contexts_are_never_in_memory_together(tokens: int, rows: int, most_mib: int) -> None:
    """Scores of 512 tokens and 131,072 keys would be 16 GiB for all heads, and 256 MiB for their sums; pools are not copied."""
    step = jax.jit(sparse_step(tokens, rows, "reference"), donate_argnums=DONATED)
    memory = step.lower(*operands(tokens, rows, "float32")).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * np.prod(POOL) * (KEY_WIDTH + WIDTH)
    assert memory.temp_size_in_bytes < most_mib << 20


def test_rows_choose_the_same_alone_and_among_others() -> None:
    """Whole numbers have many equal scores, and no rounding."""
    case = cases.Case((1, 1, 1), (90, 4, 33), 8)
    given = cases.operands(case)
    own_case = cases.Case((1,), (case.lengths[0],), 8)  # one program: lengths are operands
    run, run_alone = (
        jax.jit(lambda given, each=each: cases.run(each, given, "reference")) for each in (case, own_case)
    )
    together = np.asarray(run(given))
    for row in range(3):
        own = given._replace(
            **{name: getattr(given, name)[row : row + 1] for name in ("queries", "weights", "keys", "q", "latents")},
            **{
                name: getattr(given, name)[row : row + 1]
                for name in ("tables", "lengths", "token_pages", "token_slots")
            },
            query_starts=np.array([0, 1], np.int32),
        )
        np.testing.assert_allclose(run_alone(own)[0], together[row], atol=1e-6)


def test_buckets_and_loops_choose_the_largest_scores_and_the_first_of_equal_ones() -> None:
    """Scores that differ in their last bits, and in their first; what stands after a text is larger than all of it."""
    random, num_keys, num_counted, count = np.random.default_rng(0), 256, 64, 12
    in_buckets = jax.jit(lambda x, ends: selection.in_buckets(x, ends, num_counted, count, 16))
    in_loops = jax.jit(lambda x, blocks: selection.in_loops(x, blocks, num_counted, count))
    for longest in (3, 16, 17, 200):
        ranks = random.choice(np.array([1, 2, 9, 2**31, 2**31 + 1, 2**32 - 9], np.uint32), (2, 3, num_keys))
        ends = np.array([[longest, longest - 1, 1], [0, longest, 2]], np.int32)
        visible = np.arange(num_keys) < ends[..., None]
        wanted = np.zeros((2, 3, count), np.int32)
        for place in np.ndindex(2, 3):
            best = np.argsort(-ranks[place][: ends[place]].astype(np.int64), kind="stable")[:count]
            wanted[place][: len(best)] = np.sort(best)
        np.testing.assert_array_equal(in_buckets(np.where(visible, ranks, np.uint32(2**32 - 1)), ends), wanted)
        blocks = np.int32(-(-longest // num_counted))
        np.testing.assert_array_equal(in_loops(np.where(visible, ranks, np.uint32(0)), blocks), wanted)


def test_buckets_grow_to_all_keys_in_whole_blocks() -> None:
    assert selection.bucket_sizes(256, 32, 4) == [4, 16, 64, 256]
    assert selection.bucket_sizes(200, 48, 4) == [4, 16, 96, 200]
    assert selection.bucket_sizes(8, 32, 8) == [8]
