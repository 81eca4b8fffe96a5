"""The models of the fake executor: steps whose tokens or vectors can be computed by hand.

`FakeTokens` keeps token ids in its KV cache. A step writes its tokens through the block tables and then reads each
row's WHOLE past back through them; the next token is `next_token(past, seed)`. So a wrong block table, a page published
too early, a page lost or shared by mistake, or a wrong prefix hit gives a wrong token, and a read of a slot that was
never written (or that `poison` wiped) raises `PoisonError`.

A request that is penalized for what it generated must have initialised its slot with its tokens: the model keeps them as
a device keeps their counts, and anything else than the request's whole past is a `PoisonError` as well. Like a device it
keeps the last token of every slot and whether it ended its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from jaxserve.executor.fake.caches import POISON as _POISON
from jaxserve.executor.fake.caches import FakeDrafts, FakeStates, FakeWindow, PoisonError
from jaxserve.executor.fake.experts import FAKE_EXPERTS, StepExperts
from jaxserve.executor.fake.pages import FakePages
from jaxserve.executor.protocol import PlanT_contra, ResultT_co
from jaxserve.ipc.engine_spec import Script
from jaxserve.ipc.messages import EmbeddingInfo, ModelInfo
from jaxserve.kv.tiers.device import PageDevice
from jaxserve.kv.tiers.page import CacheBlock, PageLayout
from jaxserve.sampling.params import COLUMNS
from jaxserve.scheduler.plan import (
    NO_SLOT,
    UNREAD_TOKEN,
    Buckets,
    EmbedPlan,
    EmbedResult,
    PromptScores,
    StepPlan,
    StepResult,
)
from jaxserve.types import MAX_TOP_LOGPROBS, NULL_BLOCK, BlockId


class FakeModel(Protocol[PlanT_contra, ResultT_co]):
    """Computes plans in the order of their submission."""

    buckets: Buckets
    model_info: ModelInfo
    eos_token_ids: frozenset[int]

    def check(self, plan: PlanT_contra) -> None:
        """Raise ValueError if a real executor had no program for `plan`."""
        ...

    def compute(self, plan: PlanT_contra) -> ResultT_co:
        """Return the result of a plan, without its device seconds."""
        ...

    def lose_state(self) -> None:
        """Forget everything, as a device does after a failed step."""
        ...

    @property
    def pages(self) -> PageDevice[Any] | None:
        """Copies of pages; None for a model without."""
        ...

    @property
    def snapshots(self) -> FakePages | None:
        """Copies of the slots of recurrent states; None for a model without."""
        ...


def _model_info(buckets: Buckets, **values: Any) -> ModelInfo:
    fixed: dict[str, Any] = {"kv_dtype": "int64", "platform": "fake", "num_devices": 1, "fingerprint": "0000fa4e"}
    return ModelInfo(max_num_seqs=buckets.max_num_seqs, **fixed, **values)


_TEMPERATURE: Final = list(COLUMNS).index("temperature")
_PENALTY: Final = list(COLUMNS).index("presence_penalty")
_SEED: Final = list(COLUMNS).index("seed")


def next_token(tokens: Sequence[int] | np.ndarray, vocab_size: int, seed: int | None = None) -> int:
    """Return the token after `tokens`: `sum((position + 1) * token)`, and for a sampled one a term of its seed and position."""
    values = np.asarray(tokens, np.int64)
    total = int(values @ np.arange(1, len(values) + 1))
    if seed is not None:
        total += (seed + 1) * (31 * len(values) + 7)
    return total % vocab_size


def _allowed_token(token: int, words: np.ndarray) -> int:
    """Return the first token from `token` on that a mask allows; the first of all if there is none."""
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


class FakeTokens:
    """A model that generates."""

    def __init__(
        self,
        buckets: Buckets,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        max_model_len: int = 2048,
        eos_token_ids: frozenset[int] = frozenset(),
        script: Script | None = None,
        windows: Sequence[tuple[int, int]] = (),
        num_state_slots: int = 0,
        num_ranks: int = 1,
        returns_experts: bool = False,
    ) -> None:
        """windows: tokens and pages of sliding-window groups. num_state_slots: 0 for a model without recurrent layers. num_ranks:
        data ranks that have equal shares of them.

        returns_experts: results have the experts of their tokens, see `fake_experts`.
        """
        self.buckets = buckets
        self.eos_token_ids = eos_token_ids
        self.model_info = _model_info(
            buckets,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_kv_blocks=num_blocks,
            block_size=block_size,
            windows=tuple(windows),
            num_state_slots=num_state_slots,
            routed_experts=FAKE_EXPERTS if returns_experts else None,
        )
        self._experts: StepExperts | None = None
        """The experts of the step that is computed."""
        self.windows = [
            FakeWindow(window, count, block_size, table, 1 + len(windows))
            for table, (window, count) in enumerate(windows, start=1)
        ]
        self._states = FakeStates(num_state_slots, num_ranks) if num_state_slots else None
        self._pool = np.full((num_blocks, block_size), _POISON, np.int64)
        self.snapshots: FakePages | None = None
        if self._states is not None:
            layout = PageLayout("fake", "states", (CacheBlock("states", "sums", self._states.slots[0].nbytes),))
            self.snapshots = FakePages(self._states.slots, layout, num_ranks)
        layout = PageLayout("fake", str(block_size), (CacheBlock("tokens", "ids", self._pool[0].nbytes),))
        if self.snapshots is not None:
            layout = replace(layout, snapshot=self.snapshots.layout)
        self.pages = FakePages(self._pool, layout, num_ranks)
        self._vocab_size = vocab_size
        self._script = script
        self._last_tokens = np.zeros(buckets.max_num_seqs, np.int64)
        self._is_ended = np.zeros(buckets.max_num_seqs, np.bool_)
        self._counted: dict[int, list[int]] = {}
        """Tokens of the requests whose slot was initialised, by slot."""
        self._drafts = FakeDrafts()

    def poison(self, blocks: Sequence[BlockId]) -> None:
        """Wipe pages: a request that still reads them is wrong."""
        self._pool[list(blocks)] = _POISON

    def lose_state(self) -> None:
        self._pool[:] = _POISON
        for window in self.windows:
            window.pool[:] = _POISON
        if self._states is not None:
            self._states.lose()
        self._is_ended[:] = True
        self._counted.clear()

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute steps until one ends a request. Raises PoisonError."""
        self._counted |= {init.slot: init.token_ids.tolist() for init in plan.slot_inits}
        if self.model_info.routed_experts is not None:
            num_steps = plan.num_steps if plan.draft_lengths is None else 1 + self.buckets.num_drafts
            self._experts = StepExperts(plan, num_steps)
        if plan.draft_lengths is not None:
            return self._result(plan, self._speculate(plan, plan.draft_lengths.tolist()), is_speculative=True)
        tokens = []
        for step in range(plan.num_steps):
            newest, has_end = self._one_step(plan, step)
            tokens.append(newest)
            if has_end:
                break
        return self._result(plan, np.array(tokens, np.int32))

    def _result(self, plan: StepPlan, tokens: np.ndarray, *, is_speculative: bool = False) -> StepResult:
        ranks = np.arange(MAX_TOP_LOGPROBS, dtype=np.int32)
        return StepResult(
            token_ids=tokens,
            logprobs=np.full((len(tokens), len(plan.request_ids)), -1.0, np.float32),
            top_token_ids=(tokens[0][:, None] + ranks) % self._vocab_size,
            top_logprobs=np.broadcast_to(-1.0 - ranks, (len(tokens[0]), MAX_TOP_LOGPROBS)).astype(np.float32),
            device_seconds=0.0,
            prompt_scores=None if plan.targets is None else self._scores(plan.targets),
            is_speculative=is_speculative,
            routed_experts=None if self._experts is None else self._experts.array[: len(tokens)],
        )

    def _speculate(self, plan: StepPlan, lengths: Sequence[int]) -> np.ndarray:
        """Compute a speculative step with drafts of these lengths; returns the accepted tokens `[1 + N, B]`."""
        written: set[tuple[int, int]] = set()
        live: dict[int, tuple[int, list[int]]] = {}
        for row, slot in enumerate(plan.slots.tolist()):
            newest = int(plan.token_ids[row])
            if newest == UNREAD_TOKEN and self._is_ended[slot]:
                continue
            first, known = int(plan.num_computed_tokens[row]), self._last_tokens[slot]
            if plan.is_position_unread is not None and plan.is_position_unread[row]:
                first = self._drafts.positions[slot]
            length = min(lengths[row], int(plan.length_limits[row]) - first - 2)
            waiting = self._drafts.tokens.get(slot, [])
            drafted = waiting if plan.drafted_tokens is None else plan.drafted_tokens[row].tolist()
            own = [int(known) if newest == UNREAD_TOKEN else newest, *drafted[: max(0, length)]]
            live[row] = first, own
            self._write(plan, row, first, np.array(own), written)
        tokens = np.full((1 + self.buckets.num_drafts, len(lengths)), UNREAD_TOKEN, np.int32)
        for row, (first, own) in live.items():
            for ahead in range(len(own)):
                past = self._read(plan, row, first + ahead, first + ahead + 1)
                if self._experts is not None:
                    self._experts.note(ahead, row, past)
                tokens[ahead, row] = self._sample(plan, row, past)
                is_end = self._store(plan, row, past, int(tokens[ahead, row]))
                if is_end or own[ahead + 1 : ahead + 2] != [tokens[ahead, row]]:
                    break
            if plan.drafted_tokens is not None:
                if self._states is not None:
                    self._states.step(plan, [row], 0, [past])
                continue
            text = [*past.tolist(), int(tokens[ahead, row])]
            guess = partial(self._sample, plan, row)
            self._drafts.draft(int(plan.slots[row]), text, self.buckets.num_drafts, guess, self._vocab_size)
        return tokens

    def _scores(self, targets: np.ndarray) -> PromptScores:
        """Return log-probability -t and rank t for target t, and t and the tokens after it as the most likely ones."""
        ranks = np.arange(MAX_TOP_LOGPROBS, dtype=np.int32)
        return PromptScores(
            logprobs=-targets.astype(np.float32),
            ranks=targets,
            top_token_ids=(targets[:, None] + ranks) % self._vocab_size,
            top_logprobs=np.broadcast_to(-1.0 - ranks, (len(targets), MAX_TOP_LOGPROBS)).astype(np.float32),
        )

    def _one_step(self, plan: StepPlan, step: int) -> tuple[np.ndarray, bool]:
        """Compute step number `step` of a plan; returns the tokens by row, and True if any of them ends its request."""
        starts = np.cumsum(plan.num_scheduled_tokens) - plan.num_scheduled_tokens
        goes_on = (plan.token_ids[starts] == UNREAD_TOKEN) | (step > 0)
        live = [row for row, slot in enumerate(plan.slots) if not (goes_on[row] and self._is_ended[slot])]
        written: set[tuple[int, int]] = set()
        for row in live:
            own = plan.token_ids[starts[row] : starts[row] + plan.num_scheduled_tokens[row]]
            first = int(plan.num_computed_tokens[row]) + step
            self._write(plan, row, first, self._last_tokens[plan.slots[row]] if goes_on[row] else own, written)
        tokens = np.full(len(plan.request_ids), UNREAD_TOKEN, np.int32)
        has_end = False
        firsts = (plan.num_computed_tokens + step).tolist()
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens + step).tolist()
        pasts = [self._read(plan, row, firsts[row], ends[row]) for row in live]
        if self._states is not None:
            self._states.step(plan, live, step, pasts)
        for row, past in zip(live, pasts, strict=True):
            if self._experts is not None:
                self._experts.note(step, row, past, int(plan.num_scheduled_tokens[row]))
            tokens[row] = self._sample(plan, row, past)
            if plan.is_sampling[row] and plan.slots[row] != NO_SLOT:
                has_end |= self._store(plan, row, past, int(tokens[row]))
        return tokens, has_end

    def _sample(self, plan: StepPlan, row: int, past: np.ndarray) -> int:
        seed = int(plan.sampling[row, _SEED]) if plan.sampling[row, _TEMPERATURE] else None  # 0.0 is all zero bits
        scripted = self._script.next_token(past.tolist()) if self._script is not None else None
        token = next_token(past, self._vocab_size, seed) if scripted is None else scripted
        words = next((mask.words for mask in plan.masks if mask.slot == plan.slots[row]), None)
        return token if words is None else _allowed_token(token, words)

    def _store(self, plan: StepPlan, row: int, past: np.ndarray, token: int) -> bool:
        """Keep a request's new token in its slot; returns True if it ends the request."""
        slot = int(plan.slots[row])
        if plan.sampling[row, _PENALTY] and self._counted.get(slot) != past.tolist():
            raise PoisonError(f"{plan.request_ids[row]} has {past.tolist()}, counted {self._counted.get(slot)}")
        self._counted.get(slot, []).append(token)
        self._last_tokens[slot] = token
        self._is_ended[slot] = token in plan.stop_token_ids[row] or len(past) + 1 >= plan.length_limits[row]
        return bool(self._is_ended[slot])

    def check(self, plan: StepPlan) -> None:
        counts = plan.num_scheduled_tokens
        num_rows = len(plan.request_ids)
        by_kind = {"decode": self.buckets.decode, "speculate": self.buckets.speculate}
        table, has_single_tokens = by_kind.get(plan.kind, self.buckets.mixed), plan.kind in by_kind
        capacity = plan.bucket if has_single_tokens else self.buckets.mixed_rows(plan.bucket)
        if plan.bucket not in table:
            raise ValueError(f"there is no program {plan.kind}/{plan.bucket}")
        if not 0 < num_rows <= capacity or plan.num_tokens > plan.bucket or counts.sum() != plan.num_tokens:
            raise ValueError(f"{num_rows} rows with {plan.num_tokens} tokens do not fit {plan.kind}/{plan.bucket}")
        num_single = int((counts == 1).sum())
        slots = plan.slots[plan.slots != NO_SLOT].tolist()
        if len(set(slots)) < len(slots):
            raise ValueError(f"two rows share a slot: {plan.slots.tolist()}")
        most = {"decode": self.buckets.max_decode_steps, "speculate": 1 + self.buckets.num_drafts}
        if plan.num_steps > most.get(plan.kind, 1):
            raise ValueError(f"no program does {plan.num_steps} {plan.kind} steps in one call")
        if counts.min() < 1 or (counts[:num_single] != 1).any() or (has_single_tokens and num_single < num_rows):
            raise ValueError(f"rows of {counts.tolist()} tokens are no {plan.kind} step")

    def _write(self, plan: StepPlan, row: int, first: int, tokens: np.ndarray, written: set[tuple[int, int]]) -> None:
        for offset, token in enumerate(np.atleast_1d(tokens)):
            slot = self._slot(plan, row, first + offset)
            if slot in written:
                raise PoisonError(f"slot {slot} is written twice in one step")
            if not 0 <= token < self._vocab_size:
                raise PoisonError(f"{plan.request_ids[row]} writes token {token} at position {first + offset}")
            written.add(slot)
            self._pool[slot] = token
        for window in self.windows:
            window.write(plan, row, first, np.atleast_1d(tokens))

    def _read(self, plan: StepPlan, row: int, first: int, length: int) -> np.ndarray:
        """Return the first `length` tokens of a row's request, of which those from `first` on attend to the ones before."""
        num_pages = -(-length // self._pool.shape[1])
        past: np.ndarray = self._pool[plan.block_tables[row, :num_pages]].reshape(-1)[:length]
        if (past == _POISON).any():
            raise PoisonError(f"{plan.request_ids[row]} reads slots that hold nothing: {past.tolist()}")
        for window in self.windows:
            window.check(plan, row, first, past)
        return past

    def _slot(self, plan: StepPlan, row: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self._pool.shape[1])
        block = int(plan.block_tables[row, page])
        if block == NULL_BLOCK:
            raise PoisonError(f"{plan.request_ids[row]} has no page for position {position}")
        return block, offset


def fake_vector(token_ids: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """Return how many of the tokens leave each remainder when divided by `size`."""
    return np.bincount(np.asarray(token_ids) % size, minlength=size).astype(np.float32)


class FakeVectors:
    """A model that embeds."""

    def __init__(self, buckets: Buckets, block_size: int, vocab_size: int, max_model_len: int, size: int) -> None:
        self.buckets = buckets
        self.eos_token_ids: frozenset[int] = frozenset()
        self.pages = self.snapshots = None
        self.model_info = _model_info(
            buckets,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_kv_blocks=0,
            block_size=block_size,
            embedding=EmbeddingInfo(size, "mean", normalizes=True),
        )
        self._size = size

    def check(self, plan: EmbedPlan) -> None:
        if plan.bucket not in self.buckets.mixed or plan.num_tokens > plan.bucket:
            raise ValueError(f"there is no program for {plan.num_tokens} tokens in embed/{plan.bucket}")

    def compute(self, plan: EmbedPlan) -> EmbedResult:
        """Return `fake_vector` of each text."""
        texts = np.split(plan.token_ids, np.cumsum(plan.num_text_tokens)[:-1])
        return EmbedResult(np.stack([fake_vector(text, self._size) for text in texts]), 0.0)

    def lose_state(self) -> None:
        """There is none."""
