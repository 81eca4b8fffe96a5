"""Which texts become vectors in the next step.

A text is computed whole, in one step, and then it is over: nothing is kept from step to step, so there are no pages,
no slots and nobody who runs on. One step takes waiting texts in order of rank (lower `priority` first, then arrival)
while tokens and rows last. Nobody overtakes: the first one that does not fit any more is the first of the next step.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.errors import ContextLengthError, InvalidRequestError, RateLimitError, RequestError
from jaxserve.ipc.messages import AddRequest, EngineStats, ErrorInfo, RequestOutput
from jaxserve.scheduler.admission import error_info
from jaxserve.scheduler.embed_plan import EmbedPlan, EmbedResult
from jaxserve.scheduler.plan import Buckets
from jaxserve.types import FinishReason, RequestId


@dataclass(slots=True)
class _Text:
    """A request until its vector is there."""

    request_id: RequestId
    token_ids: np.ndarray  # int32
    text_pair_start: int
    """Where the second text of a pair begins; the number of tokens if it is none."""
    rank: tuple[int, int]
    arrival_s: float
    queue_seconds: float = 0.0


_rank = attrgetter("rank")


class EmbedScheduler:
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
        self._max_model_len = min(max_model_len, self._max_tokens)
        self._vocab_size = vocab_size
        self._max_requests = buckets.max_num_seqs + config.max_queued_requests
        self._clock = clock
        self._texts: dict[RequestId, _Text] = {}
        self._waiting: list[_Text] = []
        self._in_flight: deque[EmbedPlan] = deque()
        self._num_arrivals = 0
        self._num_prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        """Texts without their vectors, or steps whose results nobody has taken in."""
        return bool(self._texts or self._in_flight)

    def add(self, message: AddRequest) -> ErrorInfo | None:
        """Queue a text, or say why not. A refused one leaves no trace."""
        rejection = self._rejection(message)
        if rejection is not None:
            return error_info(rejection)
        text = _Text(
            message.request_id,
            np.asarray(message.prompt_token_ids, np.int32),
            len(message.prompt_token_ids) if message.text_pair_start is None else message.text_pair_start,
            (message.priority, self._num_arrivals),
            self._clock(),
        )
        self._num_arrivals += 1
        self._texts[text.request_id] = text
        insort(self._waiting, text, key=_rank)
        return None

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestOutput]:
        """End these requests now. Unknown ids are skipped: they ended while the abort was on its way."""
        ended = [
            self._end(request_id, "abort") for request_id in dict.fromkeys(request_ids) if request_id in self._texts
        ]
        self._waiting = [text for text in self._waiting if text.request_id in self._texts]
        return ended

    def abort_all(self, error: ErrorInfo) -> list[RequestOutput]:
        """End everything with `error`: the engine stops."""
        self._waiting.clear()
        return [self._end(request_id, "error", error) for request_id in list(self._texts)]

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def schedule(self) -> EmbedPlan | None:
        """The next step; None when nobody waits. Answer plans in their order, each with `update`, or the oldest with `fail`."""
        num_texts = num_tokens = 0
        for text in self._waiting[: self._buckets.max_num_seqs]:
            if num_tokens + len(text.token_ids) > self._max_tokens:
                break
            num_texts, num_tokens = num_texts + 1, num_tokens + len(text.token_ids)
        if not num_texts:
            return None
        texts, self._waiting = self._waiting[:num_texts], self._waiting[num_texts:]
        now = self._clock()
        for text in texts:
            text.queue_seconds = now - text.arrival_s
        plan = EmbedPlan(
            bucket=self._buckets.pick("embed", num_tokens),
            request_ids=tuple(text.request_id for text in texts),
            num_text_tokens=np.array([len(text.token_ids) for text in texts], np.int32),
            token_ids=np.concatenate([text.token_ids for text in texts]),
            text_pair_starts=np.array([text.text_pair_start for text in texts], np.int32),
        )
        self._in_flight.append(plan)
        return plan

    def take_outputs(self) -> list[RequestOutput]:
        """There are none but what `update`, `fail` and aborts bring."""
        return []

    def update(self, plan: EmbedPlan, result: EmbedResult) -> list[RequestOutput]:
        """Take in what the oldest step in flight computed: each of its texts is over."""
        self._land(plan)
        outputs = []
        for request_id, vector in zip(plan.request_ids, result.vectors, strict=True):
            text = self._texts.pop(request_id, None)  # None: aborted meanwhile
            if text is not None:
                self._num_prompt_tokens += len(text.token_ids)
                outputs.append(
                    RequestOutput(
                        request_id,
                        [],
                        finish_reason="stop",
                        queue_seconds=text.queue_seconds,
                        vector=vector.astype("<f4").tobytes(),
                    )
                )
        return outputs

    def fail(self, plan: EmbedPlan, error: ErrorInfo) -> list[RequestOutput]:
        """End the texts of a step that failed and of the later ones in flight. Those that wait go on."""
        lost = [plan, *list(self._in_flight)[1:]]
        self._land(plan)
        self._in_flight.clear()
        return [
            self._end(request_id, "error", error)
            for step in lost
            for request_id in step.request_ids
            if request_id in self._texts
        ]

    def stats(self) -> EngineStats:
        """Gauges as they are; counters since the last call."""
        num_tokens, self._num_prompt_tokens = self._num_prompt_tokens, 0
        return EngineStats(
            num_running=len(self._texts) - len(self._waiting),
            num_waiting=len(self._waiting),
            kv_cache_usage=0.0,
            num_prompt_tokens=num_tokens,
        )

    def _rejection(self, message: AddRequest) -> RequestError | None:
        token_ids = message.prompt_token_ids
        if message.request_id in self._texts:
            return InvalidRequestError(f"request id {message.request_id!r} is in use", param="request_id")
        if not token_ids:
            return InvalidRequestError("input is empty: at least one token is needed", param="input")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            return InvalidRequestError(
                f"input holds token ids outside of this model's, 0 to {self._vocab_size - 1}", param="input"
            )
        if len(token_ids) > self._max_model_len:
            return ContextLengthError(
                f"This model's maximum context length is {self._max_model_len} tokens, the input has {len(token_ids)}.",
                param="input",
            )
        if len(self._texts) >= self._max_requests:
            return RateLimitError(f"the queue is full: {len(self._texts)} requests run or wait. Please retry later.")
        return None

    def _land(self, plan: EmbedPlan) -> None:
        if not self._in_flight or self._in_flight[0] is not plan:
            raise RuntimeError("steps are answered in the order of their plans")
        self._in_flight.popleft()

    def _end(self, request_id: RequestId, reason: FinishReason, error: ErrorInfo | None = None) -> RequestOutput:
        del self._texts[request_id]
        return RequestOutput(request_id, [], finish_reason=reason, error=error)
