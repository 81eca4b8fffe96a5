"""Sparse attention at the sizes of DeepSeek-V3.2: memory that does not grow with tokens times context times heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.paged_attention import Paging, Scoring, ragged_layout
from jaxserve_kernels.sparse_attention import IndexQueries, cases, write_and_attend, write_and_choose
from jaxtyping import Array

PAGES, PAGE_SIZE, NUM_CHOSEN, HEADS = 2048, 64, 2048, 64
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rows", "most_mib"), [(512, 4, 128), (64, 64, 80)])
def test_scores_of_long_contexts_are_never_in_memory_together(tokens: int, rows: int, most_mib: int) -> None:
    """Scores of 512 tokens and 131,072 keys would be 16 GiB for all heads, and 256 MiB for their sums; pools are not copied."""

    def step(*given: Array) -> tuple[Array, ...]:
        queries, weights, keys, key_pages, q, latents, pages, tables, lengths, starts, *places = given
        ragged = None if tokens == rows else ragged_layout(starts, jnp.int32(0), num_tokens=tokens)
        paging, layer = Paging(tables, lengths, starts, *places, ragged), jnp.int32(1)
        index = IndexQueries(queries, weights)
        chosen, key_pages = write_and_choose(index, keys, key_pages, layer, paging, num_chosen=NUM_CHOSEN)
        operands = (q, latents, pages, layer, paging, chosen)
        options = {"num_chosen": NUM_CHOSEN, "value_width": 512}
        return (*write_and_attend(*operands, **options, scoring=Scoring(0.1)), key_pages)  # type: ignore[arg-type]

    pool = (2, 8193, 1, PAGE_SIZE)
    floats = [(tokens, HEADS, 128), (tokens, HEADS), (tokens, 128), (*pool, 128)]
    floats += [(tokens, 16, 576), (tokens, 1, 576), (*pool, 576)]
    whole = [(rows, PAGES), (rows,), (rows + 1,), (tokens,), (tokens,)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats]
    shapes += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in whole]
    memory = jax.jit(step, donate_argnums=(3, 6)).lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * 2 * 8193 * PAGE_SIZE * (128 + 576)
    assert memory.temp_size_in_bytes < most_mib * MIB


def test_rows_choose_the_same_alone_and_among_others() -> None:
    """Whole numbers have many equal scores, and no rounding."""
    case = cases.Case((1, 1, 1), (90, 4, 33), 8)
    given = cases.operands(case)
    together = np.asarray(cases.run(case, given, "reference"))
    for row in range(3):
        own = given._replace(
            **{name: getattr(given, name)[row : row + 1] for name in ("queries", "weights", "keys", "q", "latents")},
            **{
                name: getattr(given, name)[row : row + 1]
                for name in ("tables", "lengths", "token_pages", "token_slots")
            },
            query_starts=np.array([0, 1], np.int32),
        )
        alone = cases.run(cases.Case((1,), case.lengths[row : row + 1], 8), own, "reference")
        np.testing.assert_allclose(alone[0], together[row], atol=1e-6)
