"""The contract between scheduler and runner: what one step computes, and what comes back.

Letters: B rows, T tokens of the step, M pages per request at most, C sampling columns, K decode steps of a
burst.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from jaxserve.sampling.params import SlotInit
from jaxserve.types import NO_LOGPROBS, ProgramKind, RequestId

UNREAD_TOKEN: Final = -1
"""In place of a token id: the token that the step before sampled for the row's slot. The host has not read it."""
NO_TARGET: Final = -1
NO_SLOT: Final = -1
"""Of a row whose sampled token the device does not keep."""
MAX_STOP_TOKENS: Final = 8
"""Stop token ids the device looks for. The host looks for all of them: the device's verdict only saves work."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes that exist. One table, read by warm-up and scheduler alike.

    `decode[i]` rows with one token each; `mixed[i]` tokens of up to `max_rows(...)` rows, where rows
    with one token (decodes) come first and prefill chunks follow.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    max_num_seqs: int
    max_decode_steps: int = 1
    """Decode steps that a decode program can do in one call."""

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
class Mask:
    """The tokens that a request in this slot may get from this step."""

    slot: int
    words: np.ndarray  # int32 [W], bits as in `sampling.bits`


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows are in the order of `request_ids`: decode rows first, then prefill chunks.

    Row i computes tokens at positions `num_computed_tokens[i] ... + num_scheduled_tokens[i] - 1` of its
    request; their ids stand in `token_ids`, row after row. When `is_sampling[i]`, the row's last token
    is the newest of its request and the step samples the next one, which the device keeps in `slots[i]`.

    A row whose only token is UNREAD_TOKEN goes on from what its slot holds. When the device has seen the end
    of that request meanwhile, the row computes nothing, writes nothing and samples UNREAD_TOKEN.

    A request that decodes may have further rows behind its own: one for each token that is guessed to come next, at its
    position, in no slot. What they sample is worth something as far as the guesses are right.
    """

    kind: ProgramKind
    bucket: int
    request_ids: tuple[RequestId, ...]
    slots: np.ndarray  # int32 [B], a different one for each running request; NO_SLOT for guessed tokens
    num_scheduled_tokens: np.ndarray  # int32 [B]
    num_computed_tokens: np.ndarray  # int32 [B]
    token_ids: np.ndarray  # int32 [sum(num_scheduled_tokens)]
    block_tables: np.ndarray  # int32 [B, M], unused entries are the null block
    is_sampling: np.ndarray  # bool [B]
    sampling: np.ndarray  # int32 [B, C], see sampling.params.COLUMNS
    length_limits: np.ndarray  # int32 [B], known tokens at which a request ends
    stop_token_ids: np.ndarray  # int32 [B, MAX_STOP_TOKENS], unused entries are -1
    num_top_logprobs: int
    """Most log-probabilities any sampling row wants beyond the chosen token's; NO_LOGPROBS when not even that one."""
    num_steps: int = 1
    """K: decode steps to do in one call, each from the tokens of the one before. They end early, all rows
    together, as soon as any row's request ends. Block tables hold pages for all of them."""
    slot_inits: tuple[SlotInit, ...] = ()
    """Slots to initialise before the step. Most steps have none."""
    num_prompt_logprobs: int = NO_LOGPROBS
    """As `num_top_logprobs`, for prompt tokens; more than NO_LOGPROBS in mixed steps only."""
    targets: np.ndarray | None = None
    """int32 [sum(num_scheduled_tokens)], the token that follows each one in its prompt, NO_TARGET where nobody asks.
    None when nobody asks for any."""
    adapters: np.ndarray | None = None
    """int32 [B], the adapter of each row, 0 where it has none. None when nobody has one."""
    masks: tuple[Mask, ...] = ()
    """Of the rows that sample under a grammar; they take the place of what the slots say of allowed tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_padding_tokens(self) -> int:
        return self.bucket - self.num_tokens


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of each token's target, tokens as in the plan; where there is no target, no meaning."""

    logprobs: np.ndarray  # float32 [T]
    ranks: np.ndarray  # int32 [T], 1 is the most likely
    top_token_ids: np.ndarray  # int32 [T, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: np.ndarray  # float32 [T, MAX_TOP_LOGPROBS]; both valid when plan.num_prompt_logprobs > 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device says, rows as in the plan. Rows with `is_sampling` false hold no meaning.

    K is the number of steps that were done: between 1 and `plan.num_steps`.
    """

    token_ids: np.ndarray  # int32 [K, B]
    logprobs: np.ndarray  # float32 [K, B], of the chosen token, from the unscaled logits, if wanted
    top_token_ids: np.ndarray  # int32 [B, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: np.ndarray  # float32 [B, MAX_TOP_LOGPROBS]; both valid when plan.num_top_logprobs > 0, and K is 1
    device_seconds: float
    prompt_scores: PromptScores | None = None
    """When the plan has targets."""

    @property
    def num_steps(self) -> int:
        return len(self.token_ids)
