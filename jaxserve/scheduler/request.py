"""One request while the engine owns it."""

from __future__ import annotations

import numpy as np

from jaxserve.ipc.messages import AddRequest
from jaxserve.kv.block_table import BlockTable
from jaxserve.sampling.params import device_row, needs_state
from jaxserve.scheduler.grammars import GrammarState
from jaxserve.scheduler.plan import MAX_STOP_TOKENS, NO_TARGET, SlotInit
from jaxserve.types import FinishReason

_PROMPT_END = 16
"""Tokens that a prediction is thought to have followed once before."""
_OUTPUT_ROOM = 128
"""Output tokens that fit before the token buffer grows."""


class Request:
    """Tokens, progress and pages of one request. Changed by the scheduler only.

        0 ........ num_prompt_tokens ........ num_tokens          known tokens: prompt, then output
                                              num_tokens ... + num_unread_tokens    sampled by steps in flight
        0 ........ num_computed_tokens                            their KV is in the pages of `table`, once
                                                                  the steps in flight are over

    It waits, runs (holds pages and a slot) or is finished. Preemption sets `num_computed_tokens` back
    to 0 and keeps the tokens.
    """

    __slots__ = (
        "_buffer",
        "_foretold",
        "adapter",
        "all_stop_ids",
        "arrival_s",
        "finish_reason",
        "grammar",
        "is_plain",
        "length_limit",
        "max_draft_tokens",
        "max_output_tokens",
        "needs_state",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_rejected_tokens",
        "num_tokens",
        "num_unread_tokens",
        "num_unscored",
        "queue_seconds",
        "rank",
        "request_id",
        "sampling",
        "sampling_row",
        "shortest_match",
        "slot",
        "stop_row",
        "stop_token_ids",
        "table",
    )

    def __init__(
        self,
        message: AddRequest,
        table: BlockTable,
        max_output_tokens: int,
        arrival: int,
        arrival_s: float,
        eos_token_ids: frozenset[int] = frozenset(),
        grammar: GrammarState | None = None,
    ) -> None:
        self.request_id = message.request_id
        self.adapter = message.adapter
        self.sampling = message.sampling
        self.stop_token_ids = frozenset(message.sampling.stop_token_ids)
        self.grammar = grammar
        """Where its reply stands in the grammar that it is held to."""
        self.sampling_row = device_row(message.sampling, is_masked=grammar is not None)
        self.needs_state = needs_state(message.sampling)
        self.all_stop_ids = self.stop_token_ids | eos_token_ids
        """What min_tokens keeps back; also with ignore_eos, as in vLLM."""
        self.stop_row = _stop_row(message, eos_token_ids)
        wanted = (grammar, message.sampling.num_top_logprobs, message.sampling.num_prompt_logprobs)
        self.is_plain = all(want is None for want in wanted)
        """Whether nothing but its tokens is wanted, and no grammar restricts them: most requests, in most steps."""
        self.max_draft_tokens = 0
        """To guess ahead in the next step; 0 for a request that gets no drafts."""
        self.shortest_match = 0
        """Newest tokens that must have stood together before, for what followed to be a draft."""
        self.num_accepted_tokens = self.num_rejected_tokens = 0
        """Of all drafts so far."""
        self.table = table
        self.max_output_tokens = max_output_tokens
        self.rank = (message.priority, arrival)
        """Who goes first: the lower priority value, then the earlier arrival. Unique."""
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.length_limit = self.num_prompt_tokens + max_output_tokens
        self.num_tokens = self.num_prompt_tokens
        self.num_unread_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when the request first started."""
        self.num_unscored = 0 if message.sampling.num_prompt_logprobs is None else self.num_prompt_tokens - 1
        """Prompt tokens at its end whose log-probabilities were asked for and are not known. Such a request finds
        nothing in the prefix cache: what is not computed has none."""
        self.arrival_s = arrival_s
        """The scheduler's clock when the request came; `arrival` only counts."""
        self.queue_seconds: float | None = None
        """From arrival to the step that started it first; None until then."""
        self.num_preemptions = 0
        self.slot: int | None = None
        """Its place in the device's state while it runs."""
        self.num_in_flight = 0
        """Submitted steps that still write to its pages."""
        self.finish_reason: FinishReason | None = None
        self._buffer = np.empty(self.num_tokens + min(max_output_tokens, _OUTPUT_ROOM), np.int32)
        self._buffer[: self.num_tokens] = message.prompt_token_ids
        prompt_end, prediction = message.prompt_token_ids[-_PROMPT_END:], message.prediction_token_ids
        self._foretold = np.array([*prompt_end, *prediction, -1], np.int32) if prediction else None

    @property
    def tokens(self) -> np.ndarray:
        """All known tokens; a view that is valid until the next `append`."""
        return self._buffer[: self.num_tokens]

    @property
    def tokens_to_learn_from(self) -> np.ndarray:
        """All known tokens, and before them the predicted reply behind the end of the prompt."""
        return self.tokens if self._foretold is None else np.concatenate([self._foretold, self.tokens])

    def next_tokens(self, count: int) -> np.ndarray:
        """The first `count` known tokens that are not computed; a view as `tokens`."""
        return self._buffer[self.num_computed_tokens : self.num_computed_tokens + count]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def targets(self, count: int) -> np.ndarray:
        """The prompt tokens behind the next `count` to compute, as far as their log-probabilities are wanted."""
        targets = np.full(count, NO_TARGET, np.int32)
        first = self.num_prompt_tokens - self.num_unscored  # the first target that is missing
        positions = np.arange(self.num_computed_tokens, self.num_computed_tokens + count) + 1
        is_wanted = (positions >= first) & (positions < self.num_prompt_tokens)
        targets[is_wanted] = self.tokens[positions[is_wanted]]
        return targets

    @property
    def is_ready(self) -> bool:
        """Whether no grammar keeps it from its next token."""
        return self.grammar is None or self.grammar.is_ready

    def slot_init(self) -> SlotInit:
        """Return the initial sampler state of a request that got its slot. All its tokens must have been read."""
        if self.slot is None or self.num_unread_tokens:
            raise RuntimeError(f"{self.request_id} cannot initialise its slot now")
        return SlotInit(self.slot, self.sampling, self.tokens.copy(), self.num_prompt_tokens, self.all_stop_ids)

    @property
    def is_scoring(self) -> bool:
        """Whether the tokens it computes next have targets."""
        return self.num_unscored > 0 and self.num_computed_tokens < self.num_prompt_tokens - 1

    def append(self, token: int) -> None:
        """One more output token."""
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self.num_tokens] = token
        self.num_tokens += 1


def _stop_row(message: AddRequest, eos_token_ids: frozenset[int]) -> np.ndarray:
    """The ids that end the request, as the device reads them: the first few where there are more."""
    ids = [] if message.sampling.ignore_eos else sorted(eos_token_ids)
    ids = [*ids, *message.sampling.stop_token_ids][:MAX_STOP_TOKENS]
    row = np.full(MAX_STOP_TOKENS, -1, np.int32)
    row[: len(ids)] = ids
    return row
