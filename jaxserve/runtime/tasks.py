"""Helpers around asyncio tasks, threads and signals."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class StopSignals:
    """SIGTERM and SIGINT as events: the first signal asks to drain, the second to end at once."""

    def __init__(self, on_signal: Callable[[], None] = lambda: None) -> None:
        self._on_signal = on_signal
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _note(self) -> None:
        if self.first.is_set():
            self.second.set()
        self.first.set()
        self._on_signal()


@contextlib.asynccontextmanager
async def running(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` as a task inside the block, then cancel it and wait for it. The caller asks the task for its error."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of `works` has ended, even with an error, and cancel the others."""
    tasks = {asyncio.create_task(work) for work in works}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, which does not keep the process from ending when it hangs on the network."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # the thread cannot be cancelled: its result is dropped

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)
