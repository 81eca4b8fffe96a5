"""Step plans by hand: as many rows as wanted, as far into their texts as wanted, on pages of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.rig import BLOCK_SIZE
from jaxserve.runner.inputs import Program
from jaxserve.sampling.params import EngineSamplingParams, device_row
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, UNREAD_TOKEN, StepPlan
from jaxserve.types import RequestId

NEVER = np.iinfo(np.int32).max
GREEDY = EngineSamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests that decode together."""

    program: Program
    tables: np.ndarray  # int32 [B, M]
    ids: tuple[RequestId, ...]
    sampling: EngineSamplingParams = GREEDY

    def step(self, num_computed: int, *, num_steps: int = 1, has_slots: bool = True) -> StepPlan:
        """Each row has `num_computed` tokens and computes the next. `has_slots`: it stands in the row's slot."""
        count = len(self.ids)
        return StepPlan(
            kind="decode",
            bucket=self.program.num_tokens,
            request_ids=self.ids,
            slots=np.arange(count, dtype=np.int32),
            num_scheduled_tokens=np.ones(count, np.int32),
            num_computed_tokens=np.full(count, num_computed, np.int32),
            token_ids=np.full(count, UNREAD_TOKEN if has_slots else 1, np.int32),
            block_tables=self.tables,
            is_sampling=np.ones(count, np.bool_),
            sampling=_rows_of(self.sampling, count),
            length_limits=np.full(count, NEVER, np.int32),
            stop_token_ids=np.full((count, MAX_STOP_TOKENS), -1, np.int32),
            num_top_logprobs=0,
            num_steps=num_steps,
        )


def decoding_rows(program: Program, count: int, num_tokens: int, num_blocks: int, seed: int) -> Rows:
    """`count` rows with scattered pages for `num_tokens` each."""
    used = -(-num_tokens // BLOCK_SIZE)
    order = np.random.default_rng(seed).permutation(num_blocks - 1)[: count * used] + 1
    tables = np.zeros((count, program.max_pages), np.int32)
    tables[:, :used] = order.reshape(count, used)
    return Rows(program, tables, tuple(RequestId(f"row-{index}") for index in range(count)))


def prompt_chunks(program: Program, num_tokens: int, vocab_size: int, seed: int) -> list[StepPlan]:
    """The steps of one prompt, as many tokens in each as `program` takes; the last one samples."""
    random = np.random.default_rng(seed)
    tables = np.zeros((1, program.max_pages), np.int32)
    used = -(-num_tokens // BLOCK_SIZE)
    tables[0, :used] = np.arange(1, used + 1)
    plans = []
    for start in range(0, num_tokens, program.num_tokens):
        count = min(program.num_tokens, num_tokens - start)
        plans.append(
            StepPlan(
                kind="mixed",
                bucket=program.num_tokens,
                request_ids=(RequestId("prompt"),),
                slots=np.zeros(1, np.int32),
                num_scheduled_tokens=np.full(1, count, np.int32),
                num_computed_tokens=np.full(1, start, np.int32),
                token_ids=random.integers(0, vocab_size, count).astype(np.int32),
                block_tables=tables,
                is_sampling=np.full(1, start + count == num_tokens),
                sampling=_rows_of(GREEDY, 1),
                length_limits=np.full(1, NEVER, np.int32),
                stop_token_ids=np.full((1, MAX_STOP_TOKENS), -1, np.int32),
                num_top_logprobs=0,
            )
        )
    return plans


def beside_a_chunk(rows: Rows, program: Program, num_computed: int, vocab_size: int, seed: int) -> StepPlan:
    """A mixed step: every row decodes its next token, and the rest of the bucket is the beginning of a prompt.

    The prompt's pages are those of the first row: what is computed does not matter.
    """
    count = len(rows.ids)
    counts = np.ones(count + 1, np.int32)
    counts[-1] = program.num_tokens - count
    computed = np.full(count + 1, num_computed, np.int32)
    computed[-1] = 0
    random = np.random.default_rng(seed)
    return StepPlan(
        kind="mixed",
        bucket=program.num_tokens,
        request_ids=(*rows.ids, RequestId("prompt")),
        slots=np.arange(count + 1, dtype=np.int32),
        num_scheduled_tokens=counts,
        num_computed_tokens=computed,
        token_ids=random.integers(0, vocab_size, counts.sum()).astype(np.int32),
        block_tables=np.concatenate([rows.tables, _first_pages(program)]),
        is_sampling=np.ones(count + 1, np.bool_),
        sampling=_rows_of(GREEDY, count + 1),
        length_limits=np.full(count + 1, NEVER, np.int32),
        stop_token_ids=np.full((count + 1, MAX_STOP_TOKENS), -1, np.int32),
        num_top_logprobs=0,
    )


def _first_pages(program: Program) -> np.ndarray:
    """Return a table of the pool's first pages, enough for the bucket."""
    table = np.zeros((1, program.max_pages), np.int32)
    used = -(-program.num_tokens // BLOCK_SIZE)
    table[0, :used] = np.arange(1, used + 1)
    return table


def _rows_of(sampling: EngineSamplingParams, count: int) -> np.ndarray:
    return np.tile(device_row(sampling), (count, 1))
