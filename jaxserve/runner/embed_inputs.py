"""What a program that makes vectors is given: one int32 vector, from the field table of `runner.embedding`."""

from __future__ import annotations

import numpy as np

from jaxserve.runner.embedding import EMBED_FIELDS
from jaxserve.runner.inputs import Program, leading_ones, packed_size, split
from jaxserve.scheduler.embed_plan import EmbedBuckets, EmbedPlan


def embed_programs(buckets: EmbedBuckets, max_pages: int) -> tuple[Program, ...]:
    """Every program that exists, largest first. max_pages: of the longest text, of one token each where there are none."""
    return tuple(Program("embed", size, buckets.rows(size), max_pages, 0) for size in reversed(buckets.tokens))


def pool_pages(buckets: EmbedBuckets, page_size: int) -> int:
    """Pages that hold any step, the null page included: each text may leave its last page nearly empty."""
    return max(buckets.tokens) // page_size + min(buckets.max_num_seqs, max(buckets.tokens)) + 1


def pack_texts(plan: EmbedPlan, program: Program, page_size: int) -> np.ndarray:
    """A plan as the program's input; whatever the plan does not fill is padding."""
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
