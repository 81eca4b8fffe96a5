"""Programs compiled side by side before anything is measured, so that compiling disturbs no clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

MAX_COMPILE_THREADS = 8
GRACE_S = 20.0
"""Longest wait for compilations that have begun when their time is up."""
DISTURBED = "a program was still compiled when measuring began: the times of this part are too long"
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A function, and its arguments as trees of shapes and types."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    donated: tuple[int, ...] = ()

    def compile(self) -> jax.stages.Compiled:
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.shapes).compile()


class Programs(Generic[Key]):
    """Executables by key. One that did not compile, or not in time, raises when it is asked for, and only then.

    Nothing compiles once the constructor has returned, unless a compilation lasts longer than `GRACE_S` after the time
    is up: then `is_disturbed`.
    """

    def __init__(self, wanted: Mapping[Key, Wanted], timeout_s: float) -> None:
        threads = ThreadPoolExecutor(min(MAX_COMPILE_THREADS, len(os.sched_getaffinity(0))))
        self._futures: dict[Key, Future[jax.stages.Compiled]] = {
            key: threads.submit(each.compile) for key, each in wanted.items()
        }
        self.is_disturbed = bool(stop_compiling(threads, self._futures.values(), timeout_s))

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        future = self._futures[key]
        if not future.done() or future.cancelled():
            raise TimeoutError(f"{key} was not compiled in time")
        return future.result()


def stop_compiling(threads: ThreadPoolExecutor, futures: Collection[Future[Any]], timeout_s: float) -> set[Future[Any]]:
    """Wait, cancel what has not begun, and wait for what has: a compilation cannot be interrupted.

    Returns the futures that still run, which disturbs every clock.
    """
    wait(futures, timeout_s)
    threads.shutdown(wait=False, cancel_futures=True)
    return wait([future for future in futures if not future.cancelled()], GRACE_S).not_done
