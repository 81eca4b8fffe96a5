"""An executor whose tokens can be computed by hand, for every test that needs an engine but no model.

Its KV cache holds token ids. A step writes its tokens through the block tables and then reads each
row's WHOLE past back through them; the next token is `next_token(past, seed)`. So a wrong block table,
a page published too early, a page lost or shared by mistake, or a wrong prefix hit gives a wrong token,
and a read of a slot that nobody has written (or that `poison` wiped) raises `PoisonError`.

A request that is penalized for what it generated must have initialised its slot with its tokens: the fake keeps them as a
device keeps their counts, and reads of anything else than the request's whole past are a `PoisonError` as well.

Like a device it keeps the last token of every slot and whether it ended its request, it runs steps in
their order, and it takes its time: a step is done `device_seconds` after the one before it or after its
submission. What it computes is computed when somebody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from jaxserve.config import Config
from jaxserve.errors import CheckpointError
from jaxserve.ipc.engine_spec import FakeOptions, Script
from jaxserve.ipc.messages import ModelInfo
from jaxserve.runner.buckets import resolve_limits
from jaxserve.sampling.params import COLUMNS
from jaxserve.scheduler.plan import NO_SLOT, UNREAD_TOKEN, Buckets, PromptScores, StepPlan, StepResult
from jaxserve.types import MAX_TOP_LOGPROBS, NULL_BLOCK, BlockId

_POISON: Final = -1
_TEMPERATURE: Final = list(COLUMNS).index("temperature")
_PENALTY: Final = list(COLUMNS).index("presence_penalty")
_SEED: Final = list(COLUMNS).index("seed")


class PoisonError(Exception):
    """A slot was read that holds nothing."""


def next_token(tokens: Sequence[int] | np.ndarray, vocab_size: int, seed: int | None = None) -> int:
    """The token after `tokens`: `sum((position + 1) * token)`, and for a sampled one a term of its seed and position."""
    values = np.asarray(tokens, np.int64)
    total = int(values @ np.arange(1, len(values) + 1))
    if seed is not None:
        total += (seed + 1) * (31 * len(values) + 7)
    return total % vocab_size


def powers_of_two(largest: int) -> tuple[int, ...]:
    """1, 2, 4 ... and `largest` itself."""
    return tuple(sorted({1 << i for i in range(largest.bit_length()) if 1 << i < largest} | {largest}))


def _allowed_token(token: int, words: np.ndarray) -> int:
    """The first one from `token` on that a mask allows, beginning anew behind the last."""
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


class StepLostError(Exception):
    """A step before this one failed."""


@dataclass(slots=True)
class FakePending:
    """A step that is computed when its result is asked for."""

    executor: FakeExecutor
    plan: StepPlan
    index: int
    started: float
    outcome: StepResult | Exception | None = field(default=None)

    def is_done(self) -> bool:
        return self.outcome is not None or self.executor.would_be_done(self)

    def result(self) -> StepResult:
        while self.outcome is None:
            self.executor.compute_next()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeExecutor:
    """An Executor without a device."""

    def __init__(
        self,
        buckets: Buckets,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        max_model_len: int = 2048,
        eos_token_ids: frozenset[int] = frozenset(),
        device_seconds: float = 0.0,
        fail_at_steps: frozenset[int] = frozenset(),
        gate: threading.Event | None = None,
        script: Script | None = None,
    ) -> None:
        """`gate`: every step waits for it, so that a test can act while a step is under way."""
        self._buckets = buckets
        self._pool = np.full((num_blocks, block_size), _POISON, np.int64)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._device_seconds = device_seconds
        self._fail_at_steps = fail_at_steps
        self._gate = gate
        self._script = script
        self._num_steps = 0
        self._queue: deque[FakePending] = deque()
        self._free_at = 0.0
        """When the device has done what was computed so far."""
        self._last_tokens = np.zeros(buckets.max_num_seqs, np.int64)
        self._is_ended = np.zeros(buckets.max_num_seqs, np.bool_)
        self._counted: dict[int, list[int]] = {}
        """Tokens of the requests whose slot was initialised, by slot."""

    @classmethod
    def start(cls, config: Config, options: FakeOptions) -> FakeExecutor:
        """The fake that a server with this `config` would run."""
        if options.start_error is not None:
            raise CheckpointError(options.start_error)
        limits = resolve_limits("cpu", config.scheduler)
        rows, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        return cls(
            Buckets(powers_of_two(rows), powers_of_two(tokens), rows, options.max_decode_steps),
            options.num_blocks,
            config.cache.block_size,
            options.vocab_size,
            max_model_len=min(options.max_model_len, config.model.max_model_len or options.max_model_len),
            eos_token_ids=frozenset(options.eos_token_ids),
            device_seconds=options.device_seconds,
            fail_at_steps=frozenset(options.fail_at_steps),
            script=options.script,
        )

    @property
    def model_info(self) -> ModelInfo:
        num_blocks, block_size = self._pool.shape
        return ModelInfo(
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            num_kv_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self._buckets.max_num_seqs,
            kv_dtype="int64",
            platform="fake",
            num_devices=1,
            fingerprint="0000fa4e",
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def buckets(self) -> Buckets:
        return self._buckets

    def submit(self, plan: StepPlan) -> FakePending:
        self._check(plan)
        pending = FakePending(self, plan, self._num_steps, time.monotonic())
        self._num_steps += 1
        self._queue.append(pending)
        return pending

    def compilations(self) -> dict[str, int]:
        return {"warmup": len(self._buckets.decode) + len(self._buckets.mixed), "serving": 0}

    def close(self) -> None:
        pass

    def poison(self, blocks: Sequence[BlockId]) -> None:
        """Wipe pages: whoever still reads them is wrong."""
        self._pool[list(blocks)] = _POISON

    def would_be_done(self, pending: FakePending) -> bool:
        """Whether a device would have finished the step by now; only the oldest step can have."""
        return self._queue[0] is pending and time.monotonic() >= self._finish_time(pending, 1)

    def compute_next(self) -> None:
        """Run the oldest step that waits to its end."""
        pending = self._queue.popleft()
        if self._gate is not None:
            self._gate.wait()
        try:
            if pending.index in self._fail_at_steps:
                raise RuntimeError(f"step {pending.index} fails as told")
            pending.outcome = self._compute(pending)
        except Exception as error:
            pending.outcome = error
            self.lose_everything()

    def lose_everything(self) -> None:
        """What a failed step leaves: steps behind it fail, and nothing is in the pool any more."""
        while self._queue:
            self._queue.popleft().outcome = StepLostError("a step before this one has failed")
        self._pool[:] = _POISON
        self._is_ended[:] = True
        self._counted.clear()

    def _finish_time(self, pending: FakePending, num_steps: int) -> float:
        return max(pending.started, self._free_at) + num_steps * self._device_seconds

    def _compute(self, pending: FakePending) -> StepResult:
        plan = pending.plan
        self._counted |= {init.slot: init.token_ids.tolist() for init in plan.slot_inits}
        tokens = []
        for step in range(plan.num_steps):
            newest, has_end = self._one_step(plan, step)
            tokens.append(newest)
            if has_end:
                break
        started = max(pending.started, self._free_at)
        self._free_at = self._finish_time(pending, len(tokens))
        if self._device_seconds:
            time.sleep(max(0.0, self._free_at - time.monotonic()))
        ranks = np.arange(MAX_TOP_LOGPROBS, dtype=np.int32)
        return StepResult(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.full((len(tokens), len(plan.request_ids)), -1.0, np.float32),
            top_token_ids=(tokens[0][:, None] + ranks) % self._vocab_size,
            top_logprobs=np.broadcast_to(-1.0 - ranks, (len(tokens[0]), MAX_TOP_LOGPROBS)).astype(np.float32),
            device_seconds=self._free_at - started,
            prompt_scores=None if plan.targets is None else self._scores(plan.targets),
        )

    def _scores(self, targets: np.ndarray) -> PromptScores:
        """Of target t: log-probability -t, rank t, and t and those after it as the most likely ones."""
        ranks = np.arange(MAX_TOP_LOGPROBS, dtype=np.int32)
        return PromptScores(
            logprobs=-targets.astype(np.float32),
            ranks=targets,
            top_token_ids=(targets[:, None] + ranks) % self._vocab_size,
            top_logprobs=np.broadcast_to(-1.0 - ranks, (len(targets), MAX_TOP_LOGPROBS)).astype(np.float32),
        )

    def _one_step(self, plan: StepPlan, step: int) -> tuple[np.ndarray, bool]:
        """Step number `step` of a plan: the tokens by row, and whether any of them is the end of its request."""
        starts = np.cumsum(plan.num_scheduled_tokens) - plan.num_scheduled_tokens
        goes_on = (plan.token_ids[starts] == UNREAD_TOKEN) | (step > 0)
        live = [row for row, slot in enumerate(plan.slots) if not (goes_on[row] and self._is_ended[slot])]
        written: set[tuple[int, int]] = set()
        for row in live:
            own = plan.token_ids[starts[row] : starts[row] + plan.num_scheduled_tokens[row]]
            self._write(plan, row, step, self._last_tokens[plan.slots[row]] if goes_on[row] else own, written)
        tokens = np.full(len(plan.request_ids), UNREAD_TOKEN, np.int32)
        masks = {mask.slot: mask.words for mask in plan.masks}
        has_end = False
        for row in live:
            past = self._read(plan, row, step)
            seed = int(plan.sampling[row, _SEED]) if plan.sampling[row, _TEMPERATURE] else None  # 0.0 is all zero bits
            scripted = self._script.next_token(past.tolist()) if self._script is not None else None
            tokens[row] = next_token(past, self._vocab_size, seed) if scripted is None else scripted
            if int(plan.slots[row]) in masks:
                tokens[row] = _allowed_token(int(tokens[row]), masks[int(plan.slots[row])])
            slot = int(plan.slots[row])
            if plan.is_sampling[row] and slot != NO_SLOT:
                if plan.sampling[row, _PENALTY] and self._counted.get(slot) != past.tolist():
                    raise PoisonError(f"{plan.request_ids[row]} has {past.tolist()}, counted {self._counted.get(slot)}")
                self._counted.get(slot, []).append(int(tokens[row]))
                self._last_tokens[slot] = tokens[row]
                is_end = tokens[row] in plan.stop_token_ids[row] or len(past) + 1 >= plan.length_limits[row]
                self._is_ended[slot] = is_end
                has_end = has_end or bool(is_end)
        return tokens, has_end

    def _check(self, plan: StepPlan) -> None:
        """A real executor has no program for a plan that breaks these."""
        counts = plan.num_scheduled_tokens
        num_rows = len(plan.request_ids)
        table = self._buckets.decode if plan.kind == "decode" else self._buckets.mixed
        capacity = plan.bucket if plan.kind == "decode" else self._buckets.mixed_rows(plan.bucket)
        if plan.bucket not in table:
            raise ValueError(f"there is no program {plan.kind}/{plan.bucket}")
        if not 0 < num_rows <= capacity or plan.num_tokens > plan.bucket or counts.sum() != plan.num_tokens:
            raise ValueError(f"{num_rows} rows with {plan.num_tokens} tokens do not fit {plan.kind}/{plan.bucket}")
        num_single = int((counts == 1).sum())
        slots = plan.slots[plan.slots != NO_SLOT].tolist()
        if len(set(slots)) < len(slots):
            raise ValueError(f"two rows share a slot: {plan.slots.tolist()}")
        if plan.num_steps > (self._buckets.max_decode_steps if plan.kind == "decode" else 1):
            raise ValueError(f"no program does {plan.num_steps} {plan.kind} steps in one call")
        if counts.min() < 1 or (counts[:num_single] != 1).any() or (plan.kind == "decode" and num_single < num_rows):
            raise ValueError(f"rows of {counts.tolist()} tokens are no {plan.kind} step")

    def _write(self, plan: StepPlan, row: int, step: int, tokens: np.ndarray, written: set[tuple[int, int]]) -> None:
        first = int(plan.num_computed_tokens[row]) + step
        for offset, token in enumerate(np.atleast_1d(tokens)):
            slot = self._slot(plan, row, first + offset)
            if slot in written:
                raise PoisonError(f"slot {slot} is written twice in one step")
            if not 0 <= token < self._vocab_size:
                raise PoisonError(f"{plan.request_ids[row]} writes token {token} at position {first + offset}")
            written.add(slot)
            self._pool[slot] = token

    def _read(self, plan: StepPlan, row: int, step: int) -> np.ndarray:
        length = int(plan.num_computed_tokens[row] + plan.num_scheduled_tokens[row]) + step
        num_pages = -(-length // self._pool.shape[1])
        past: np.ndarray = self._pool[plan.block_tables[row, :num_pages]].reshape(-1)[:length]
        if (past == _POISON).any():
            raise PoisonError(f"{plan.request_ids[row]} reads slots that hold nothing: {past.tolist()}")
        return past

    def _slot(self, plan: StepPlan, row: int, position: int) -> tuple[int, int]:
        page, offset = divmod(position, self._pool.shape[1])
        block = int(plan.block_tables[row, page])
        if block == NULL_BLOCK:
            raise PoisonError(f"{plan.request_ids[row]} has no page for position {position}")
        return block, offset
