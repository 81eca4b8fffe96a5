"""Texts are packed one after the other, and a failed step leaves fresh pages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner.embedding import (
    EMBED_FIELDS,
    embed_programs,
    embedding_task,
    means,
    pack_texts,
    pool_pages,
    read_tokens,
)
from jaxserve.runner.inputs import Program, split
from jaxserve.runner.runner import Runner
from jaxserve.scheduler.plan import Buckets, EmbedPlan
from jaxserve.types import RequestId

PROGRAM = Program("embed", 16, 4, 3, 0)


def plan(*lengths: int, text_pair_starts: tuple[int, ...] | None = None) -> EmbedPlan:
    counts = np.array(lengths, np.int32)
    names = tuple(RequestId(str(i)) for i in range(len(lengths)))
    tokens = np.arange(10, 10 + counts.sum(), dtype=np.int32)
    return EmbedPlan(16, names, counts, tokens, np.array(text_pair_starts or lengths, np.int32))


def test_texts_follow_each_other_on_pages_of_their_own() -> None:
    field = split(pack_texts(plan(1, 5, 4, text_pair_starts=(1, 2, 4)), PROGRAM, 4), PROGRAM, EMBED_FIELDS)
    assert field["tokens"].tolist() == [*range(10, 20), *[0] * 6]
    assert field["positions"].tolist() == [0, *range(5), *range(4), *[0] * 6]
    assert field["token_types"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, *[0] * 6]
    assert field["rows"].tolist() == [0, *[1] * 5, *[2] * 4, *[4] * 6]
    assert field["starts"].tolist() == [0, 1, 6, 10, 10]
    assert field["first_pages"].tolist() == [1, 2, 4, 0], "of 1, 2 and 1 pages; page 0 is nobody's"
    assert int(field["num_single_rows"]) == 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_pool_holds_the_worst_step(page_size: int) -> None:
    buckets = Buckets((), (16, 64), 8)
    worst = plan(*[2 * page_size + 1] * 7, 64 - 7 * (2 * page_size + 1)) if page_size < 4 else plan(*[1] * 8)
    field = split(
        pack_texts(worst, Program("embed", 64, 8, 4, 0), page_size), Program("embed", 64, 8, 4, 0), EMBED_FIELDS
    )
    last_page = field["first_pages"][7] + -(-worst.num_text_tokens[7] // page_size) - 1
    assert last_page < pool_pages(buckets, page_size)
    assert [program.num_rows for program in embed_programs(buckets, 4)] == [8, 8]


def test_pooling_reads_the_tokens_it_names_and_no_padding() -> None:
    hidden = jnp.asarray(np.arange(12, dtype=np.float32).reshape(6, 2)).at[5].set(jnp.nan)
    starts = jnp.array([0, 3, 5, 5])
    last, first = (read_tokens(starts, 6, pooling) for pooling in ("last", "cls"))
    assert last is not None and first is not None and read_tokens(starts, 6, "mean") is None
    assert [last.places[:2].tolist(), first.places[:2].tolist()] == [[2, 4], [0, 3]]
    assert int(last.num_real) == int(first.num_real) == 2, "the third text is padding"
    assert means(hidden, jnp.array([0, 0, 0, 1, 1, 3]), starts)[:2].tolist() == [[2, 3], [7, 8]]


def test_a_step_that_fails_leaves_fresh_pages_and_the_next_one_runs() -> None:
    state = CountingState()

    def step(params: Any, pool: Any, packed: Any) -> Any:
        if pool == 0:
            raise RuntimeError("broken")
        return pool, (jnp.full((4, 2), float(pool)),)

    runner = Runner(embedding_task("mean", 4, 16), (), state, {PROGRAM: step})  # type: ignore[arg-type, unused-ignore]
    with pytest.raises(RuntimeError, match="broken"):
        runner.submit(plan(2, 3))
    assert runner.submit(plan(2, 3)).result().vectors.tolist() == [[1, 1], [1, 1]]
    assert state.arrays == 1


class CountingState:
    """State whose arrays are the number of times it was renewed."""

    arrays = 0

    def renew(self) -> None:
        self.arrays += 1
