"""Decode attention over latent vectors in buckets of context: against dense softmax, in every bucket and over several blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.latent_attention import buckets
from jaxserve_kernels.paged_attention import Scoring, bucketed

NUM_HEADS, WIDTH, VALUE_WIDTH, PAGE_SIZE, NUM_PAGES, MAX_PAGES = 6, 24, 20, 16, 40, 12
_decode = jax.jit(buckets.decode_attention, static_argnames=("value_width", "scoring"))
LENGTHS = ((1, 1, 0, 1), (32, 33, 0, 7), (64, 65, 1, 16), (129, 5, 0, 192))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 2, 4, ... pages of 16 tokens, in blocks of 3."""
    monkeypatch.setattr(bucketed, "_SHORTEST", 32)
    monkeypatch.setattr(buckets, "_BLOCK_BYTES", 3 * 4 * PAGE_SIZE * WIDTH * 4)


def _operands(lengths: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(sum(lengths))
    q = random.standard_normal((len(lengths), NUM_HEADS, WIDTH), np.float32)
    pages = random.standard_normal((2, NUM_PAGES, 1, PAGE_SIZE, WIDTH), np.float32)
    pages[:, 0] = 1e4  # no row sees the null page
    tables, free = np.zeros((len(lengths), MAX_PAGES), np.int32), iter(random.permutation(np.arange(1, NUM_PAGES)))
    for row, length in enumerate(lengths):
        for column in range(-(-length // PAGE_SIZE)):
            tables[row, column] = next(free)
    return q, pages, tables, np.array(lengths, np.int32)


def _dense(q: np.ndarray, pages: np.ndarray, tables: np.ndarray, lengths: np.ndarray, scoring: Scoring) -> np.ndarray:
    out = np.zeros(q.shape)
    for row, length in enumerate(lengths):
        if length:
            vectors = pages[1, tables[row]].reshape(-1, WIDTH)[:length].astype(np.float64)
            scores = scoring.scale * q[row].astype(np.float64) @ vectors.T
            if scoring.softcap is not None:
                scores = scoring.softcap * np.tanh(scores / scoring.softcap)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[row] = weights / weights.sum(1, keepdims=True) @ vectors
    return out


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_buckets_equal_dense_softmax(lengths: tuple[int, ...], softcap: float | None) -> None:
    q, pages, tables, counts = _operands(lengths)
    scoring = Scoring(0.2, softcap)
    found = _decode(
        *map(jnp.asarray, (q, pages)),
        jnp.int32(1),
        *map(jnp.asarray, (tables, counts)),
        value_width=VALUE_WIDTH,
        scoring=scoring,
    )
    np.testing.assert_allclose(
        np.asarray(found), _dense(q, pages, tables, counts, scoring)[..., :VALUE_WIDTH], atol=2e-5
    )


def test_buckets_are_no_loop_and_longer_contexts_are() -> None:
    q, pages, _, counts = _operands(LENGTHS[0])

    def text(num_pages: int) -> str:
        tables = jnp.zeros((4, num_pages), jnp.int32)
        program = jax.jit(
            lambda *given: buckets.decode_attention(*given, value_width=VALUE_WIDTH, scoring=Scoring(0.2))
        )
        return program.lower(q, pages, jnp.int32(1), tables, counts).as_text()

    most = 8 * 3
    assert "stablehlo.case" in text(most)
    assert "stablehlo.while" not in text(most)
    assert "stablehlo.while" in text(most + 1)
