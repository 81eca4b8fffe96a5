"""Programs that are loaded or compiled while the server serves: a larger program does their steps until they are there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxserve_kernels.backend import NATIVE

from jaxserve.executor.preparation import Preparation
from jaxserve.runner.images.programs import ROW_KINDS
from jaxserve.runner.inputs import Program
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.runner import Runner

_LOG = logging.getLogger(__name__)


def late_programs(prepared: Preparation) -> tuple[Program, ...]:
    """Return the programs whose steps a larger one does as well, with the same bits and at almost the same cost, largest first.

    That is so with native CPU kernels: they skip padding, and compute a row in the same way in any batch.
    """
    if prepared.embedding is not None or prepared.skeleton.policy.backend not in NATIVE:
        return ()
    largest: dict[str, Program] = {}
    for program in prepared.programs:
        largest.setdefault(program.kind, program)
    needed = {*largest.values()}
    return tuple(each for each in prepared.programs if each.kind not in ROW_KINDS and each not in needed)


class LatePrograms:
    """Loads or compiles programs one after the other in a thread of its own, the smallest first, and hands each to the runner.

    The smallest first: few requests follow a start, and their steps gain most. So an earlier start that ended too soon has left
    the first ones in the cache.
    """

    def __init__(
        self, prepared: Preparation, cache: ProgramCache, programs: Sequence[Program], runner: Runner[Any, Any]
    ) -> None:
        """programs: largest first."""
        self._prepared = prepared
        self._cache = cache
        self._left = list(programs)
        self._runner = runner
        self._is_closed = False

    @property
    def num_left(self) -> int:
        """Return the number of programs that are not there yet."""
        return len(self._left)

    def start(self) -> None:
        """Begin, and return at once. The thread does not keep the process alive."""
        if self._left:
            threading.Thread(target=self._make_all, name="late-programs", daemon=True).start()

    def close(self) -> None:
        """Begin no further program."""
        self._is_closed = True

    def _make_all(self) -> None:
        started, num_made = time.monotonic(), 0
        while self._left and not self._is_closed:
            program = self._left[-1]
            try:
                made = self._prepared.make_program(program, self._cache)
            except Exception as error:  # any of the compiler; larger programs go on to serve its steps
                _LOG.warning("program %s could not be compiled (%s): a larger one does its steps", program.name, error)
            else:
                self._runner.add(program, made.compiled)
                num_made += 1
            self._left.pop()
        if not self._left:
            _LOG.info("%d more programs were made in %.1f s, beside requests", num_made, time.monotonic() - started)
