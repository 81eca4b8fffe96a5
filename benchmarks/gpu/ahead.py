"""Programs compiled side by side before anything is measured, so that compiling disturbs no clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax

MAX_COMPILE_THREADS = 8
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A function, and shapes and types of its arguments."""

    function: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...] = ()

    def compile(self) -> jax.stages.Compiled:
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.shapes).compile()


class Programs(Generic[Key]):
    """By key. What did not compile, or not in time, raises when it is asked for, and only then."""

    def __init__(self, wanted: Mapping[Key, Wanted], timeout_s: float) -> None:
        threads = ThreadPoolExecutor(min(MAX_COMPILE_THREADS, len(os.sched_getaffinity(0))))
        self._futures: dict[Key, Future[jax.stages.Compiled]] = {
            key: threads.submit(each.compile) for key, each in wanted.items()
        }
        wait(self._futures.values(), timeout_s)
        threads.shutdown(wait=False, cancel_futures=True)

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        future = self._futures[key]
        if not future.done() or future.cancelled():
            raise TimeoutError(f"{key} was not compiled in time")
        return future.result()
