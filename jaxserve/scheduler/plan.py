"""The contract between scheduler and runner: the plans of steps, and their results.

Letters: B rows, T tokens of the step, G page tables per request of M pages at most, C sampling columns, K decode steps of a
call, N tokens that are drafted for a row of a speculative step, D numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import numpy as np

from jaxserve.sampling.params import SlotInit
from jaxserve.types import NO_LOGPROBS, ProgramKind, RequestId

UNREAD_TOKEN: Final = -1
"""Stands for the token that the previous step sampled for the row's slot, and that the host has not read."""
NO_TARGET: Final = -1
NO_SLOT: Final = -1
"""The slot of a row whose sampled token the device does not keep."""
NO_IMAGE_ROW: Final = -1
"""The row of a token that is text."""
MAX_STOP_TOKENS: Final = 8
"""Stop token ids that the device checks. The host checks all of them; the device's check only saves work."""


class Plan(Protocol):
    """One call of a program."""

    @property
    def kind(self) -> ProgramKind: ...

    @property
    def bucket(self) -> int: ...

    @property
    def request_ids(self) -> tuple[RequestId, ...]: ...

    @property
    def num_steps(self) -> int:
        """Decode steps that the call may do."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of one step, without padding."""
        ...

    @property
    def num_padding_tokens(self) -> int: ...

    @property
    def encoded_ids(self) -> Sequence[RequestId]:
        """Requests whose images are encoded before the step; they need not have tokens in it."""
        ...


class Result(Protocol):
    """The result of a call."""

    @property
    def num_steps(self) -> int:
        """Steps that were done."""
        ...

    @property
    def device_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Buckets:
    """The shapes of programs, for warm-up and for the scheduler.

    `decode[i]` rows with one token each; `mixed[i]` tokens of up to `max_rows(...)` rows, where rows
    with one token (decodes) come first and prefill chunks follow.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    max_num_seqs: int
    max_decode_steps: int = 1
    """Decode steps that a decode program can do in one call."""
    num_drafts: int = 0
    """N: the most drafted tokens of each row of a speculative step; 0: there are no such steps."""
    plans_have_drafts: bool = False
    """True if plans bring the drafted tokens (prompt lookup); False: a draft model or another drafter drafts them on the device."""

    @property
    def max_speculative_rows(self) -> int:
        """Return the most rows of a speculative step: half of all. With more, a device has no time to spare."""
        return max(1, self.max_num_seqs // 2) if self.num_drafts else 0

    @property
    def speculate(self) -> tuple[int, ...]:
        """Return the rows of the speculative programs: the sizes of decode programs that up to half of all rows need."""
        if not self.num_drafts:
            return ()
        num_smaller = sum(size < self.max_speculative_rows for size in self.decode)
        return self.decode[: num_smaller + 1]

    def mixed_rows(self, num_tokens: int) -> int:
        """Return the row capacity of `mixed[num_tokens]`."""
        return min(num_tokens, self.max_num_seqs)

    def pick(self, kind: ProgramKind, size: int) -> int:
        """Return the smallest bucket of `kind` that holds `size` rows (decode, speculate) or tokens (mixed)."""
        buckets = {"decode": self.decode, "speculate": self.speculate}.get(kind, self.mixed)
        for bucket in buckets:
            if bucket >= size:
                return bucket
        raise ValueError(f"no {kind} bucket holds {size}: there are {buckets}")


@dataclass(frozen=True, slots=True)
class Mask:
    """The tokens that this step may sample for a slot."""

    slot: int
    words: np.ndarray  # int32 [W], bits as in `sampling.bits`


@dataclass(frozen=True, slots=True, eq=False)
class EncodeItem:
    """An image, or a tile of one, to encode before a step."""

    patches: np.ndarray  # uint8 [P, F]
    positions: np.ndarray  # int32 [P, 2], row and column of each patch
    rows: np.ndarray  # int32 [N], the device's rows that its embeddings go to
    request_id: RequestId | None = None
    """The first request that needs it, which need not have tokens in the step; None for a dummy."""
    sources: np.ndarray | None = None  # int32 [N, S], see `VisionConfig.num_sources`; None: S is 0
    units: tuple[int, int] | None = None
    """Calls of the encoder's programs, the first one and the end, that are this part of an encoder call: see `runner.images.parts`.
    The call's earlier parts, with the same images, have done those before. None: all, in one part."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbedsItem:
    """Embeddings that a client gave in place of tokens, to write to the device before a step."""

    values: np.ndarray  # float32 [N, D]
    rows: np.ndarray  # int32 [N], the device's rows that they go to
    request_id: RequestId | None = None
    """The first request that needs them; None for a dummy."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Rows are in the order of `request_ids`: decode rows first, then prefill chunks.

    Row i computes tokens at positions `num_computed_tokens[i] ... + num_scheduled_tokens[i] - 1` of its
    request; their ids are in `token_ids`, row after row. If `is_sampling[i]`, the row's last token
    is the newest of its request and the step samples the next one, which the device keeps in `slots[i]`.

    A row whose only token is UNREAD_TOKEN continues from the token in its slot. If that token ended the request, the
    row computes nothing, writes nothing and samples UNREAD_TOKEN.

    A request that decodes may have further rows after its own: one for each drafted token, at its position, in no slot.
    Their samples are valid as long as the drafted tokens are right.

    In a speculative step each row has one token here, its newest, and `draft_lengths[i]` drafted tokens: those of
    `drafted_tokens`, or those that the last speculative step left in its slot. The device computes all of them, samples after
    each, and accepts the samples up to and with the first that differs from the draft or ends the request. If a draft model or
    MTP layer drafts, it then drafts N tokens for the next speculative step.
    A row whose position is unread is as far as its slot says; its positions in the plan are the largest possible ones.
    """

    kind: ProgramKind
    bucket: int
    request_ids: tuple[RequestId, ...]
    slots: np.ndarray  # int32 [B], a different one for each running request; NO_SLOT for drafted tokens
    num_scheduled_tokens: np.ndarray  # int32 [B]
    num_computed_tokens: np.ndarray  # int32 [B]
    token_ids: np.ndarray  # int32 [sum(num_scheduled_tokens)]
    block_tables: np.ndarray  # int32 [B, G * M], a table per cache group with pages; unused entries are the null block
    is_sampling: np.ndarray  # bool [B]
    sampling: np.ndarray  # int32 [B, C], see sampling.params.COLUMNS
    length_limits: np.ndarray  # int32 [B], known tokens at which a request ends
    stop_token_ids: np.ndarray  # int32 [B, MAX_STOP_TOKENS], unused entries are -1
    num_top_logprobs: int
    """Largest number of alternatives whose log-probabilities a sampling row wants; NO_LOGPROBS if no row wants any."""
    num_steps: int = 1
    """K: decode steps to do in one call, each from the tokens of the previous one. All rows end early as soon as the
    request of one row ends. Block tables have pages for all steps."""
    slot_inits: tuple[SlotInit, ...] = ()
    """Slots to initialise before the step. Most steps have none."""
    num_prompt_logprobs: int = NO_LOGPROBS
    """Like `num_top_logprobs`, for prompt tokens; more than NO_LOGPROBS in mixed steps only."""
    targets: np.ndarray | None = None
    """int32 [sum(num_scheduled_tokens)], the token that follows each one in its prompt; NO_TARGET unless its
    log-probability is wanted. None if none is wanted."""
    next_token_ids: np.ndarray | None = None
    """int32 [B], the known token that follows those of each row that samples nothing; NO_TARGET for rows that sample. None if
    all of them do."""
    adapters: np.ndarray | None = None
    """int32 [B], the adapter of each row, 0 for none. None if no row has one."""
    masks: tuple[Mask, ...] = ()
    """Masks of the rows with a grammar; they replace the allowed tokens in the slots' state."""
    draft_lengths: np.ndarray | None = None
    """int32 [B], drafted tokens to verify. None if the step is not speculative."""
    drafted_tokens: np.ndarray | None = None
    """int32 [B, N], drafted tokens of a speculative step; those after a row's draft count for nothing. None if the device has them
    in the rows' slots, and in other steps."""
    is_position_unread: np.ndarray | None = None
    """bool [B], True for rows that a speculative step in flight has moved on. None if the step is not speculative."""
    num_ahead: int = 0
    """Tokens after those of all `num_steps` whose positions a speculative step may write, as far as a row has pages."""
    state_slots: np.ndarray | None = None
    """int32 [B, 2], the slot of the recurrent state that each row reads, 0 at the start of a text, and the one that it
    writes. None for a model without recurrent layers."""
    encode_items: tuple[EncodeItem, ...] = ()
    """Images to encode before the step, in one call or in one part of it."""
    embeds_items: tuple[EmbedsItem, ...] = ()
    """Given embeddings to write before the step."""
    image_rows: np.ndarray | None = None
    """int32 [sum(num_scheduled_tokens)], the device's row with the embedding of each token that stands for one; NO_IMAGE_ROW
    for text. None without such tokens, which only mixed steps have."""
    rope_positions: np.ndarray | None = None
    """int32 [3, sum(num_scheduled_tokens)], in a model that has three rotary positions. None: the place of each token."""
    key_ends: np.ndarray | None = None
    """int32 [sum(num_scheduled_tokens)], where the keys that each token sees end, in a model whose images attend in both
    directions. None: after each token."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_padding_tokens(self) -> int:
        return self.bucket - self.num_tokens

    @property
    def encoded_ids(self) -> Sequence[RequestId]:
        items: tuple[EncodeItem | EmbedsItem, ...] = (*self.encode_items, *self.embeds_items)
        return [item.request_id for item in items if item.request_id is not None]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of each token's target, tokens as in the plan; undefined without a target."""

    logprobs: np.ndarray  # float32 [T]
    ranks: np.ndarray  # int32 [T], 1 is the most likely
    top_token_ids: np.ndarray  # int32 [T, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: np.ndarray  # float32 [T, MAX_TOP_LOGPROBS]; both valid when plan.num_prompt_logprobs > 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, rows as in the plan. Rows without `is_sampling` are undefined.

    K is the number of steps that were done: between 1 and `plan.num_steps`. In a speculative step it is 1 + N, and the
    tokens of a row are those that were accepted, then UNREAD_TOKEN.
    """

    token_ids: np.ndarray  # int32 [K, B]
    logprobs: np.ndarray  # float32 [K, B], of the chosen token, from the unscaled logits, if wanted
    top_token_ids: np.ndarray  # int32 [B, MAX_TOP_LOGPROBS], most likely first
    top_logprobs: np.ndarray  # float32 [B, MAX_TOP_LOGPROBS]; both valid when plan.num_top_logprobs > 0, and K is 1
    device_seconds: float
    prompt_scores: PromptScores | None = None
    """Set if the plan has targets."""
    is_speculative: bool = False
    routed_experts: np.ndarray | None = None
    """uint8 or uint16 [K, T, L, k], the experts that each token of the plan chose in each of L layers with experts, the best
    first. In a speculative step T is B, and K counts the tokens of a row. None unless the engine returns them."""

    @property
    def num_steps(self) -> int:
        return 1 if self.is_speculative else len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of the next of a plan's decode steps, which go on; those of the last step come with the result."""

    token_ids: np.ndarray  # int32 [B]


@dataclass(frozen=True, slots=True)
class EmbedPlan:
    """One step: whole texts, one after the other."""

    kind: ClassVar[ProgramKind] = "embed"
    num_steps: ClassVar[int] = 1
    encoded_ids: ClassVar[Sequence[RequestId]] = ()
    bucket: int
    request_ids: tuple[RequestId, ...]
    num_text_tokens: np.ndarray  # int32 [B]
    token_ids: np.ndarray  # int32 [sum(num_text_tokens)]
    text_pair_starts: np.ndarray  # int32 [B], first token of a pair's second text; without one the number of tokens

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
    num_steps: ClassVar[int] = 1
