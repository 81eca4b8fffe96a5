"""Embedding as a task of the runner: packed texts in, one pooled vector per text out.

Every text is whole. A decoder keeps keys and values in pages only within the step: the texts' pages follow each other
from page 1 on, and the next step overwrites them; one whose tokens attend in both directions uses none. Recurrent layers begin every text at a slot of zeros, and keep no states. An
encoder has no pages.

Letters: B texts, T tokens of the step, D numbers of a vector, M pages of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.paged_attention import Paging, ragged_layout
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, StateSlots, pages_shape
from jaxserve.layers.rope import query_scales, rotation, sliding_rotation
from jaxserve.layers.segment_attention import Texts
from jaxserve.models.decoder import Decoder, ReadTokens
from jaxserve.models.encoder import Encoder
from jaxserve.models.skeleton import EncoderSkeleton, ModelSkeleton
from jaxserve.runner.inputs import Program, StepTask, leading_ones, packed_size, split
from jaxserve.runner.state import StateArrays
from jaxserve.scheduler.plan import Buckets, EmbedPlan, EmbedResult
from jaxserve.types import Pooling, RequestId

EMBED_FIELDS: Final = {
    "num_single_rows": "",  # texts of one token, at the start
    "tokens": "T",
    "positions": "T",
    "token_types": "T",
    "rows": "T",  # text of each token; B for padding tokens
    "starts": "B+1",  # first token of each text, then the number of tokens
    "first_pages": "B",
}
DUMMY_TOKENS: Final = 8
"""Tokens of the second text in a dummy run; the first one has a single token."""


def embedding_task(pooling: Pooling, page_size: int, max_model_len: int) -> StepTask[EmbedPlan, EmbedResult]:
    """Return the task of an engine that embeds. page_size: tokens; 1 for an encoder, whose pages are only counted."""
    return StepTask(
        name=f"embed {pooling}",
        step=partial(embed, pooling=pooling),
        fields=EMBED_FIELDS,
        programs=embed_programs,
        pack=partial(pack_texts, page_size=page_size),
        unpack=_unpack,
        dummy_plan=partial(_dummy_plan, max_model_len=max_model_len),
    )


def embed_programs(
    buckets: Buckets, max_pages: int, num_tables: int = 1, num_state_slots: int = 0
) -> tuple[Program, ...]:
    """Return every program of these buckets, largest first. max_pages: pages of the longest text, which has one table."""
    return tuple(Program("embed", size, buckets.mixed_rows(size), max_pages, 0) for size in reversed(buckets.mixed))


def pool_pages(buckets: Buckets, page_size: int) -> int:
    """Return the pages that hold any step, the null page included: each text may leave its last page nearly empty."""
    return max(buckets.mixed) // page_size + buckets.mixed_rows(max(buckets.mixed)) + 1


def pack_texts(plan: EmbedPlan, program: Program, page_size: int) -> np.ndarray:
    """Return the packed input of `program`; what the plan does not fill is padding."""
    packed = np.zeros(packed_size(program, EMBED_FIELDS), np.int32)
    field = split(packed, program, EMBED_FIELDS)
    counts, num_tokens, num_texts = plan.num_text_tokens, plan.num_tokens, len(plan.num_text_tokens)
    starts = np.concatenate(([0], np.cumsum(counts)))
    rows = np.repeat(np.arange(num_texts), counts)
    pages = -(-counts // page_size)
    field["num_single_rows"][...] = leading_ones(counts)
    field["tokens"][:num_tokens] = plan.token_ids
    field["positions"][:num_tokens] = np.arange(num_tokens) - starts[rows]
    field["token_types"][:num_tokens] = field["positions"][:num_tokens] >= plan.text_pair_starts[rows]
    field["rows"][:num_tokens] = rows
    field["rows"][num_tokens:] = program.num_rows
    field["starts"][: num_texts + 1] = starts
    field["starts"][num_texts + 1 :] = num_tokens
    field["first_pages"][:num_texts] = 1 + np.cumsum(pages) - pages
    return packed


def _unpack(plan: EmbedPlan, program: Program, outputs: Sequence[np.ndarray], device_seconds: float) -> EmbedResult:
    return EmbedResult(outputs[0][: len(plan.request_ids)], device_seconds)


def _dummy_plan(program: Program, max_model_len: int) -> EmbedPlan:
    counts = np.array([1, min(DUMMY_TOKENS, program.num_tokens - 1, max_model_len)], np.int32)
    counts = counts[counts > 0][: program.num_rows]
    names = tuple(RequestId(f"dummy-{row}") for row in range(len(counts)))
    return EmbedPlan(program.num_tokens, names, counts, np.zeros(counts.sum(), np.int32), counts)


def embed(
    skeleton: ModelSkeleton | EncoderSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    pooling: Pooling,
) -> tuple[StateArrays, tuple[Float[Array, "B O"]]]:
    """Compute the texts' vectors in float32, not normalised, or the scores of pairs, (B, 1). DONATES the state.

    Rows after the last text have no meaning.
    """
    field, cache = split(packed, program, EMBED_FIELDS), state.cache
    read = read_tokens(field["starts"], program.num_tokens, pooling)
    model: Encoder | Decoder
    if isinstance(skeleton, EncoderSkeleton):
        longest = min(program.max_pages, program.num_tokens)  # a page of an encoder is a token
        texts = Texts(field["rows"], field["starts"][-1], longest)
        model = skeleton.build(params)
        hidden = model.hidden(field["tokens"], field["positions"], field["token_types"], texts)
        hidden = hidden if read is None else hidden[read.places]
    else:
        if cache is None:
            raise ValueError("a decoder needs pages")
        context = _context(skeleton, field, cache, program)
        model = skeleton.build(params)
        hidden, cache = model.hidden(field["tokens"], cache, context, read=read)
    with jax.named_scope("pool"):
        hidden = hidden.astype(jnp.float32)
        vectors = means(hidden, field["rows"], field["starts"]) if read is None else hidden
        return StateArrays(cache, None), (vectors if model.head is None else model.head(vectors),)


def read_tokens(starts: Int[Array, "B1"], num_tokens: int, pooling: Pooling) -> ReadTokens | None:
    """Return the token of each text whose output is the text's vector; None if a vector is the mean of all outputs."""
    if pooling == "mean":
        return None
    places = starts[1:] - 1 if pooling == "last" else starts[:-1]
    return ReadTokens(jnp.clip(places, 0, num_tokens - 1), (starts[1:] > starts[:-1]).sum(dtype=jnp.int32))


def means(hidden: Float[Array, "T D"], rows: Int[Array, "T"], starts: Int[Array, "B1"]) -> Float[Array, "B D"]:
    """Return the mean of each text's outputs."""
    counts = starts[1:] - starts[:-1]
    sums = jax.ops.segment_sum(hidden, rows, num_segments=len(counts) + 1, indices_are_sorted=True)
    return sums[:-1] / jnp.maximum(counts, 1)[:, None]


def _context(skeleton: ModelSkeleton, field: dict[str, Any], cache: Cache, program: Program) -> StepContext:
    _, num_pages, _, page_size, _ = pages_shape(cache)  # the same in every group
    positions, rows, starts = field["positions"], field["rows"], field["starts"]
    is_real = rows < program.num_rows
    firsts = field["first_pages"]
    tables = jnp.minimum(firsts[:, None] + jnp.arange(program.max_pages), num_pages - 1)  # (B, M)
    pages = (firsts[jnp.minimum(rows, program.num_rows - 1)] + positions // page_size) * is_real
    ragged = ragged_layout(
        starts, field["num_single_rows"], num_tokens=program.num_tokens, backend=skeleton.policy.attention_backend
    )
    paging = Paging(
        block_tables=tables,
        kv_lengths=starts[1:] - starts[:-1],
        query_starts=starts,
        pages=pages,
        slots=positions % page_size,
        ragged=ragged,
    )
    zeros = jnp.zeros(program.num_rows, jnp.int32)
    states = StateSlots(reads=zeros, writes=zeros + 1)  # there is one slot: what is after it is dropped
    longest = min(program.max_pages * page_size, program.num_tokens)
    return StepContext(
        rotation=rotation(skeleton.config, positions),
        sliding_rotation=sliding_rotation(skeleton.config, positions),
        query_scales=query_scales(skeleton.config, positions),
        positions=positions,
        texts=Texts(rows, starts[-1], longest) if skeleton.config.is_bidirectional else None,
        groups=tuple(paging if group.has_pages else states for group in skeleton.config.cache.groups),
    )
