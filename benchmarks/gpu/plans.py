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


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests that decode together."""

    program: Program
    tables: np.ndarray  # int32 [B, M]
    ids: tuple[RequestId, ...]

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
            sampling=_greedy(count),
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
                sampling=_greedy(1),
                length_limits=np.full(1, NEVER, np.int32),
                stop_token_ids=np.full((1, MAX_STOP_TOKENS), -1, np.int32),
                num_top_logprobs=0,
            )
        )
    return plans


def _greedy(count: int) -> np.ndarray:
    return np.tile(device_row(EngineSamplingParams(temperature=0.0)), (count, 1))
