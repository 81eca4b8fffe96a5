"""Outputs of the engine, pushed to a consumer the moment they arrive, without waking a task for each.

A step of the engine has outputs for every stream. Waking one task per stream to write one token costs more than the
token. The connection therefore calls the consumer directly, and the consumer's task sleeps until it has something to
wait for: the end, space in a buffer, or a keep-alive.

Outputs that no consumer takes, since the client reads slowly, are joined, and no call of a consumer gets more than a few: what
one turn of the event loop does for a stream is bounded however much has gathered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import msgspec

from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.types import BlockHash, RequestId

Consumer = Callable[[list[RequestOutput]], bool]
"""Takes outputs, oldest first; returns True if it can take more at once."""

PromptPages: TypeAlias = Mapping[int, tuple[BlockHash, ...]]
"""Hashes of the pages of prompts, by the identity (`id`) of their lists of token ids."""

MAX_OUTPUTS: Final = 16
"""Outputs that a consumer gets at once."""
MAX_JOINED_TOKENS: Final = 16
"""Tokens of outputs that are joined to one."""


class Submitter(Protocol):
    """The connection that a stream submits its requests to."""

    def attach(self, stream: OutputStream, requests: Sequence[AddRequest]) -> None: ...

    def detach(self, request_ids: list[RequestId]) -> None: ...


class OutputStream:
    """The outputs of some engine requests. Use as a context manager: entering submits them, leaving aborts the rest."""

    def __init__(
        self, submitter: Submitter, requests: Sequence[AddRequest], pages: PromptPages = MappingProxyType({})
    ) -> None:
        """pages: of prompts that are too long to be hashed on the event loop."""
        self.pages = pages
        self._submitter = submitter
        self._requests = requests
        self._open = {request.request_id for request in requests}
        self._outputs: list[RequestOutput] = []
        self._consumer: PushConsumer | None = None
        self._newest: dict[RequestId, int] = {}
        """Place of each request's newest output among `_outputs`, while they gather."""

    def __enter__(self) -> OutputStream:
        self._submitter.attach(self, self._requests)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop(*self._open)

    @property
    def is_finished(self) -> bool:
        """True once every request has ended and all outputs are consumed."""
        return not self._open and not self._outputs

    async def consume(self, consume: Consumer, idle_s: float = 0) -> bool:
        """Push outputs to `consume` until every request has ended or it can take no more; False after `idle_s` without any.

        `consume` runs inside the loop that receives the outputs: no task wakes up for a token. Outputs that arrived
        between two calls are pushed at once. An exception of `consume` is raised here.
        """
        with PushConsumer(consume, idle_s) as self._consumer:
            try:
                self.push()
                return await self._consumer.end()
            finally:
                self._consumer = None

    def put(self, output: RequestOutput) -> None:
        """Add one output; the connection calls `push` after the last one of a message."""
        if self._consumer is None or not self._consumer.is_open:
            self._gather(output)
        else:
            self._outputs.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.request_id)

    def push(self) -> None:
        """Push all outputs to the consumer, if there is one that can take them; else keep them."""
        consumer = self._consumer
        if consumer is not None and consumer.is_open and self._outputs:
            if len(self._outputs) <= MAX_OUTPUTS:
                outputs, self._outputs = self._outputs, []
            else:
                outputs, self._outputs = self._outputs[:MAX_OUTPUTS], self._outputs[MAX_OUTPUTS:]
            self._newest.clear()
            consumer.push(outputs)
            if self.is_finished:
                consumer.stop()
            elif self._outputs:  # after what else is ready
                asyncio.get_running_loop().call_soon(self.push)

    def _gather(self, output: RequestOutput) -> None:
        """Keep an output that no consumer takes now, joined with the newest one of its request if both are small."""
        place = self._newest.get(output.request_id)
        joined = None if place is None else _joined(self._outputs[place], output)
        if place is None or joined is None:
            self._newest[output.request_id] = len(self._outputs)
            self._outputs.append(output)
        else:
            self._outputs[place] = joined

    def stop(self, *request_ids: RequestId) -> None:
        """Abort requests whose further outputs are not needed."""
        running = [request_id for request_id in request_ids if request_id in self._open]
        self._open.difference_update(running)
        self._submitter.detach(running)


def _joined(first: RequestOutput, then: RequestOutput) -> RequestOutput | None:
    """Return two outputs of one request as one; None if they must stay apart, or have too many tokens."""
    is_plain = first.prompt_logprobs is None and then.prompt_logprobs is None and then.error is None
    is_alike = (first.logprobs is None) == (then.logprobs is None) and first.weight_version == then.weight_version
    has_tokens = bool(first.token_ids and then.token_ids) and first.finish_reason is None
    if not (is_plain and is_alike and has_tokens) or len(first.token_ids) + len(then.token_ids) > MAX_JOINED_TOKENS:
        return None
    scores = None if then.logprobs is None else [*(first.logprobs or ()), *then.logprobs]
    experts = (first.routed_experts or b"") + (then.routed_experts or b"") or None
    return msgspec.structs.replace(
        then, token_ids=[*first.token_ids, *then.token_ids], logprobs=scores, routed_experts=experts
    )


class PushConsumer:
    """One run of a consumer. Use as a context manager: its timer ends with it."""

    def __init__(self, consume: Consumer, idle_s: float) -> None:
        """`idle_s`: seconds without outputs after which the run ends; 0: no limit."""
        self._consume = consume
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Exception | bool] = self._loop.create_future()
        self._last_output_s = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._stop_if_idle) if idle_s else None

    def __enter__(self) -> PushConsumer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_open(self) -> bool:
        """True while outputs may be pushed."""
        return not self._end.done()

    def push(self, outputs: list[RequestOutput]) -> None:
        """Call the consumer. An exception ends the run and is raised in the consumer's task."""
        self._last_output_s = self._loop.time()
        try:
            wants_more = self._consume(outputs)
        except Exception as error:  # must not reach the connection, which serves other streams as well
            self._end.set_result(error)
        else:
            if not wants_more:
                self._end.set_result(True)

    def stop(self) -> None:
        """End the run: there are no more outputs."""
        if not self._end.done():
            self._end.set_result(True)

    async def end(self) -> bool:
        """Wait for the end; return False if outputs were missing for too long."""
        outcome = await self._end
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _stop_if_idle(self) -> None:
        """End an idle run. One timer serves the whole run: it is moved on instead of being set anew for each output."""
        due = self._last_output_s + self._idle_s
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._stop_if_idle)
        elif not self._end.done():
            self._end.set_result(False)
