"""Sparse attention at the sizes of DeepSeek-V3.2: memory that does not grow with tokens times context times heads."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jaxserve_kernels.sparse_attention import cases

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
