"""The contract between scheduler and runner: what one step computes, and what comes back.

Letters: B rows, T tokens of the step, M pages per request at most, C sampling columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.types import ProgramKind, RequestId


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that exist. One table, read by warm-up and scheduler alike.

    `decode[i]` rows with one token each; `mixed[i]` tokens of up to `max_rows(...)` rows, where rows
    with one token (decodes) come first and prefill chunks follow.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    max_num_seqs: int

    def mixed_rows(self, num_tokens: int) -> int:
        """Row capacity of `mixed[num_tokens]`."""
        return min(num_tokens, self.max_num_seqs)

    def pick(self, kind: ProgramKind, size: int) -> int:
        """The smallest bucket of `kind` that holds `size` rows (decode) or tokens (mixed)."""
        for bucket in self.decode if kind == "decode" else self.mixed:
            if bucket >= size:
                return bucket
        raise ValueError(f"no {kind} bucket holds {size}: largest is {(self.decode, self.mixed)}")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows are in the order of `request_ids`: decode rows first, then prefill chunks.

    Row i computes tokens at positions `num_computed_tokens[i] ... + num_scheduled_tokens[i] - 1` of its
    request; their ids stand in `token_ids`, row after row. When `is_sampling[i]`, the row's last token
    is the newest of its request and the step samples the next one.
    """

    kind: ProgramKind
    bucket: int
    request_ids: tuple[RequestId, ...]
    num_scheduled_tokens: np.ndarray  # int32 [B]
    num_computed_tokens: np.ndarray  # int32 [B]
    token_ids: np.ndarray  # int32 [sum(num_scheduled_tokens)]
    block_tables: np.ndarray  # int32 [B, M], unused entries are the null block
    is_sampling: np.ndarray  # bool [B]
    sampling: np.ndarray  # int32 [B, C], see sampling.params.COLUMNS
    num_top_logprobs: int
    """Most log-probabilities any sampling row wants beyond the chosen token's; 0 when none."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_padding_tokens(self) -> int:
        return self.bucket - self.num_tokens


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device says, rows as in the plan. Rows with `is_sampling` false hold no meaning."""

    token_ids: np.ndarray  # int32 [B]
    logprobs: np.ndarray  # float32 [B], of the chosen token, from the unscaled logits
    top_token_ids: np.ndarray  # int32 [B, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: np.ndarray  # float32 [B, MAX_TOP_LOGPROBS]; both valid when plan.num_top_logprobs > 0
    device_seconds: float
