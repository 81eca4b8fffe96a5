"""Decides which texts become vectors in the next step.

A text is computed whole, in one step, and then its request ends: there are no pages, no slots and no state between steps.
One step takes waiting texts in order of rank (lower `priority` first, then arrival) while tokens and rows last. No text
overtakes another: the first one that does not fit is the first of the next step.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.ipc.messages import AddRequest, ErrorInfo, RequestOutput
from jaxserve.scheduler.admission import EmbedAdmission
from jaxserve.scheduler.base import BaseScheduler
from jaxserve.scheduler.fair_keys import FairKeys, Rank, by_rank
from jaxserve.scheduler.isolation import Isolation
from jaxserve.scheduler.plan import Buckets, EmbedPlan, EmbedResult
from jaxserve.types import FinishReason, RequestId


@dataclass(slots=True, eq=False)
class _Text:
    """A request that has no vector yet."""

    request_id: RequestId
    token_ids: np.ndarray  # int32
    text_pair_start: int
    """The first token of a pair's second text; the number of tokens if there is none."""
    rank: Rank
    key_name: str
    arrival_s: float
    queue_seconds: float | None = None


class EmbedScheduler(BaseScheduler[_Text, EmbedPlan, EmbedResult]):
    """The texts of one engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        buckets: Buckets,
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buckets = buckets
        self._max_tokens = max(buckets.mixed)
        max_requests = buckets.max_num_seqs + config.max_queued_requests
        longest = min(max_model_len, self._max_tokens)
        fair_keys = FairKeys() if config.scheduling_policy == "fair" else None
        super().__init__(EmbedAdmission(longest, vocab_size, max_requests, config.has_priorities), clock, fair_keys)
        self._isolation = Isolation(self._enqueue, lambda text: 0)  # a text that has a vector has ended

    def schedule(self) -> EmbedPlan | None:
        """Return the next step; None if no text waits."""
        self._isolation.advance()
        if self._fair_keys is not None:
            self._fair_keys.close_gaps(self.requests.values(), self.waiting)
        num_texts = num_tokens = 0
        for text in self.waiting[: self._buckets.max_num_seqs if self.starts_requests else 0]:
            if num_tokens + len(text.token_ids) > self._max_tokens:
                break
            num_texts, num_tokens = num_texts + 1, num_tokens + len(text.token_ids)
        if not num_texts:
            return None
        texts, self.waiting = self.waiting[:num_texts], self.waiting[num_texts:]
        now = self._clock()
        for text in texts:
            text.queue_seconds = now - text.arrival_s
            insort(self.running, text, key=by_rank)
        plan = EmbedPlan(
            bucket=self._buckets.pick("embed", num_tokens),
            request_ids=tuple(text.request_id for text in texts),
            num_text_tokens=np.array([len(text.token_ids) for text in texts], np.int32),
            token_ids=np.concatenate([text.token_ids for text in texts]),
            text_pair_starts=np.array([text.text_pair_start for text in texts], np.int32),
        )
        self.in_flight.append((plan, texts))
        return plan

    def update(self, plan: EmbedPlan, result: EmbedResult) -> list[RequestOutput]:
        """Take the vectors of the oldest step in flight: each of its texts ends."""
        outputs = []
        for text, vector in zip(self._land(plan), result.vectors, strict=True):
            if self.requests.get(text.request_id) is text:  # else it was aborted
                self._remove(text)
                self.stats.prompt_tokens += len(text.token_ids)
                outputs.append(
                    RequestOutput(
                        text.request_id,
                        [],
                        finish_reason="stop",
                        queue_seconds=text.queue_seconds,
                        vector=vector.astype("<f4").tobytes(),
                    )
                )
        return outputs

    def _queue(self, message: AddRequest, rank: Rank) -> _Text:
        token_ids = np.asarray(message.prompt_token_ids, np.int32)
        start = len(token_ids) if message.text_pair_start is None else message.text_pair_start
        text = _Text(message.request_id, token_ids, start, rank, message.key_name, self._clock())
        self._enqueue(text)
        return text

    def _enqueue(self, text: _Text) -> None:
        if not self._isolation.takes(text):
            insort(self.waiting, text, key=by_rank)

    def _end(self, request: _Text, reason: FinishReason, error: ErrorInfo | None = None) -> RequestOutput:
        self._remove(request)
        return RequestOutput(request.request_id, [], finish_reason=reason, error=error)

    def _remove(self, request: _Text) -> None:
        super()._remove(request)
        if self._fair_keys is not None:
            self._fair_keys.end(request, 0)
