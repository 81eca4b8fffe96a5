"""An event loop in a separate thread, for synchronous callers, also inside another event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from jaxserve.errors import UnavailableError

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)


class Background(Generic[T]):
    """Keeps an asynchronous context open in a daemon thread until `stop`."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context
        self._running: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]
        self._running = concurrent.futures.Future()
        self._entered: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._is_stopped = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name="jaxserve", daemon=True)

    def start(self) -> None:
        """Enter the context and raise its errors. An interrupted start leaves no thread."""
        self._thread.start()
        try:
            self._entered.result()
        except BaseException:
            self.stop()
            raise

    def call(self, work: Callable[[T], Coroutine[Any, Any, R]]) -> R:
        """Run `work` in the loop and wait for it. An interruption of the wait cancels the work."""
        if os.getpid() != self._pid:
            raise UnavailableError("This LLM belongs to the process that made it: a forked one cannot use it.")
        if self._is_stopped:
            raise UnavailableError("This LLM is closed.")
        future = asyncio.run_coroutine_threadsafe(work(self._entered.result()), self._running.result()[0])
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise UnavailableError("This LLM was closed while it worked.") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel running work, leave the context and wait for its end. Later calls have no effect.

        The garbage collector may call it in the thread of the loop, which does not wait for itself.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._running.exception() is None:  # else the thread could make no loop
            loop, task = self._running.result()
            with contextlib.suppress(RuntimeError):  # the loop is closed: it ended by itself
                loop.call_soon_threadsafe(task.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError as error:
            self._fail_start(error)
        except BaseException as error:
            if not self._fail_start(error):
                _log.exception("ending the engine failed")

    def _fail_start(self, error: BaseException) -> bool:
        """Give the error to the waiting `start` and return True; return False if the start is over."""
        if self._entered.done():
            return False
        if not self._running.done():
            self._running.set_exception(error)
        self._entered.set_exception(error)
        return True

    async def _run(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a coroutine outside of any task")
        self._running.set_result((asyncio.get_running_loop(), task))
        async with self._context as entered:
            self._entered.set_result(entered)
            await asyncio.Event().wait()
