"""Outputs of the engine, pushed to a consumer the moment they arrive, without waking a task for each.

A step of the engine has outputs for every stream. Waking one task per stream to write one token costs more than the
token. The connection therefore calls the consumer directly, and the consumer's task sleeps until it has something to
wait for: the end, space in a buffer, or a keep-alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.ipc.messages import AddRequest, RequestOutput
from jaxserve.types import RequestId

Consumer = Callable[[list[RequestOutput]], bool]
"""Takes outputs, oldest first; returns True if it can take more at once."""


class Submitter(Protocol):
    """The connection that a stream submits its requests to."""

    def attach(self, stream: OutputStream, requests: Sequence[AddRequest]) -> None: ...

    def detach(self, request_ids: list[RequestId]) -> None: ...


class OutputStream:
    """The outputs of some engine requests. Use as a context manager: entering submits them, leaving aborts the rest."""

    def __init__(self, submitter: Submitter, requests: Sequence[AddRequest]) -> None:
        self._submitter = submitter
        self._requests = requests
        self._open = {request.request_id for request in requests}
        self._outputs: list[RequestOutput] = []
        self._consumer: PushConsumer | None = None

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
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._open.discard(output.request_id)

    def push(self) -> None:
        """Push all outputs to the consumer, if there is one that can take them; else keep them."""
        consumer = self._consumer
        if consumer is not None and consumer.is_open and self._outputs:
            outputs, self._outputs = self._outputs, []
            consumer.push(outputs)
            if self.is_finished:
                consumer.stop()

    def stop(self, *request_ids: RequestId) -> None:
        """Abort requests whose further outputs are not needed."""
        running = [request_id for request_id in request_ids if request_id in self._open]
        self._open.difference_update(running)
        self._submitter.detach(running)


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
