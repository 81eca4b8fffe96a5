"""The contract between scheduler and runner for embeddings: the plan of a step, and its result.

Letters: B texts, T tokens of the step, D numbers of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.types import ProgramKind, RequestId


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """One step: whole texts, one after the other."""

    bucket: int
    request_ids: tuple[RequestId, ...]
    num_text_tokens: np.ndarray  # int32 [B]
    token_ids: np.ndarray  # int32 [sum(num_text_tokens)]
    text_pair_starts: np.ndarray  # int32 [B], first token of a pair's second text; without one the number of tokens

    @property
    def kind(self) -> ProgramKind:
        return "embed"

    @property
    def num_steps(self) -> int:
        return 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_padding_tokens(self) -> int:
        return self.bucket - self.num_tokens


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Rows as in the plan."""

    vectors: np.ndarray  # float32 [B, D], as long as they come
    device_seconds: float

    @property
    def num_steps(self) -> int:
        return 1
