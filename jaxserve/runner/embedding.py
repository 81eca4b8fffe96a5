"""The forward half of a step whose outcome is a vector per text: packed texts in, pooled vectors out.

Every text is whole. A decoder keeps its keys and values in pages, as always, but only within the step: the texts'
pages lie one behind the other from page 1 on, and the next step writes over them. An encoder has none.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxserve_kernels.paged_attention import Paging, ragged_layout
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import KVPool, StepContext
from jaxserve.layers.rope import rotation, sliding_rotation
from jaxserve.layers.segment_attention import Texts
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.runner.inputs import Program, split
from jaxserve.types import Pooling

EMBED_FIELDS: Final = {
    "num_single_rows": "",  # texts of one token, at the start
    "tokens": "T",
    "positions": "T",
    "token_types": "T",
    "rows": "T",  # text of each token; padding tokens point at row B, which is nobody's
    "starts": "B+1",  # of each text; behind the last one stands the number of tokens
    "first_pages": "B",
}


def embed(
    skeleton: ModelSkeleton | EncoderSkeleton,
    params: tuple[Array, ...],
    pool: KVPool | None,
    packed: Int[Array, "I"],
    program: Program,
    pooling: Pooling,
) -> tuple[KVPool | None, Float[Array, "B D"]]:
    """The texts' vectors, float32 and as long as they come, or the pairs' scores, (B, 1); rows behind the last text hold
    no meaning."""
    field = split(packed, program, EMBED_FIELDS)
    if isinstance(skeleton, EncoderSkeleton):
        longest = min(program.max_pages, program.num_tokens)  # a page of an encoder is a token
        texts = Texts(field["rows"], field["starts"][-1], longest)
        model = skeleton.build(params)
        hidden = model.hidden(field["tokens"], field["positions"], field["token_types"], texts)
        if skeleton.config.scoring is not None:
            firsts = pooled(hidden, field["rows"], field["starts"], "cls")
            return pool, model.scores(firsts, skeleton.config.scoring)
    else:
        if pool is None:
            raise ValueError("a decoder needs pages")
        context = _context(skeleton, field, pool, program)
        hidden, pool = skeleton.build(params).hidden(field["tokens"], pool, context)
    with jax.named_scope("pool"):
        return pool, pooled(hidden.astype(jnp.float32), field["rows"], field["starts"], pooling)


def pooled(
    hidden: Float[Array, "T D"], rows: Int[Array, "T"], starts: Int[Array, "B1"], pooling: Pooling
) -> Float[Array, "B D"]:
    """One vector for each row of tokens."""
    if pooling == "last":
        return hidden[jnp.maximum(starts[1:] - 1, 0)]
    if pooling == "cls":
        return hidden[jnp.minimum(starts[:-1], len(hidden) - 1)]
    counts = starts[1:] - starts[:-1]
    sums = jax.ops.segment_sum(hidden, rows, num_segments=len(counts) + 1, indices_are_sorted=True)
    return sums[:-1] / jnp.maximum(counts, 1)[:, None]


def _context(skeleton: ModelSkeleton, field: dict[str, Any], pool: KVPool, program: Program) -> StepContext:
    num_pages, page_size = pool.k.shape[1], pool.k.shape[3]
    positions, rows, starts = field["positions"], field["rows"], field["starts"]
    is_real = rows < program.num_rows
    firsts = field["first_pages"]
    tables = jnp.minimum(firsts[:, None] + jnp.arange(program.max_pages), num_pages - 1)  # (B, M)
    pages = (firsts[jnp.minimum(rows, program.num_rows - 1)] + positions // page_size) * is_real
    ragged = ragged_layout(
        starts, field["num_single_rows"], num_tokens=program.num_tokens, backend=skeleton.policy.backend
    )
    return StepContext(
        rotation=rotation(skeleton.config, positions),
        sliding_rotation=sliding_rotation(skeleton.config, positions),
        paging=Paging(
            block_tables=tables,
            kv_lengths=starts[1:] - starts[:-1],
            query_starts=starts,
            pages=pages,
            slots=positions % page_size,
            ragged=ragged,
        ),
    )
