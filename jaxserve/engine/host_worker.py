"""The process of a host other than host 0: `python -m jaxserve.engine.host_worker`, spawned by `runtime.host_supervisor`.

It has an executor and no scheduler: it runs the steps that the leader broadcasts, and reads no results.

stdin     one line, a HostWorkerSpec; when it ends, the parent is gone, and the worker exits
stdout    inherited
exit      0 the server has stopped, 1 the engine is started again, 2 could not start (one line on stderr)
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from jaxserve.engine.process import exit_now, watch_stdin
from jaxserve.errors import RequestError, StartupError
from jaxserve.executor.hosts.agreement import shared_settings
from jaxserve.executor.hosts.memory import memory_in_use
from jaxserve.executor.hosts.messages import Failed, HostStats
from jaxserve.executor.hosts.worker import LOST, REFUSED, STOPPED, Worker
from jaxserve.executor.local import LocalExecutor
from jaxserve.executor.profiler import Profiler
from jaxserve.ipc.engine_spec import BEAT, MAX_SPEC_BYTES, SERVING_BEAT, HostWorkerSpec
from jaxserve.log import configure_logging
from jaxserve.parent import die_with_parent

_LOG = logging.getLogger("jaxserve.engine.host_worker")
_MAX_IN_FLIGHT: Final = 2
"""Steps that are not known to be done: the leader reads a step before it plans the second one after it."""


class StepLoop:
    """Runs the leader's orders, one after the other."""

    def __init__(self, executor: LocalExecutor[Any, Any], profiler: Profiler) -> None:
        self._executor = executor
        self._profiler = profiler
        self._waits: deque[Callable[[], None]] = deque()
        """For each step that may not be done, the function that waits for it."""
        self._num_steps = 0

    def run(self, worker: Worker) -> None:
        """Follow the leader. Returns never; raises the error of a step."""
        while True:
            match worker.next_order():
                case "start_profile":
                    self._profile(is_on=True)
                case "stop_profile":
                    self._profile(is_on=False)
                case plan:
                    self._waits.append(self._executor.dispatch(plan))
                    self._num_steps += 1
            if len(self._waits) > _MAX_IN_FLIGHT:
                self._waits.popleft()()

    def stats(self) -> HostStats:
        """Return the numbers of this host."""
        return HostStats(self._num_steps, memory_in_use())

    def _profile(self, *, is_on: bool) -> None:
        try:
            self._profiler.start() if is_on else self._profiler.stop()
        except RequestError as error:
            _LOG.error("no profile of this host: %s", error)


def main() -> int:
    """Run one worker; returns the exit code."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to the whole process group, and the parent decides
    try:
        line = sys.stdin.buffer.readline(MAX_SPEC_BYTES)
        if not line:
            return LOST  # the parent needs no worker any more
        spec = HostWorkerSpec.parse(line)
        configure_logging(spec.config.server.log_level, spec.config.server.log_format)
        watch_stdin(None)
        worker = Worker(
            spec.config.hosts,
            spec.host_id,
            shared_settings(spec.config),
            on_end=_end,
            on_beat=partial(_beat, spec.beat_descriptor, BEAT),
        )
    except StartupError as error:
        _LOG.error("%s", error)
        return REFUSED
    try:
        _serve(spec, worker)
    except StartupError as error:
        worker.end(
            Failed(str(error))
        )  # the process ends there if the leader has refused it, for the same reason mostly
        _LOG.error("%s", error)
        return REFUSED
    except Exception as error:
        _LOG.exception("host %d ends", spec.config.hosts.rank)
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no details')}"
        worker.end(Failed(reason, is_final=False))
    return LOST


def _serve(spec: HostWorkerSpec, worker: Worker) -> None:
    """Start with the other hosts, then run steps. Returns never; raises StartupError and errors of steps."""
    rank, folder = spec.config.hosts.rank, spec.config.server.profile_dir
    worker.gather()
    executor = LocalExecutor.start(spec.config, Path(spec.model_path), lambda *_: None, worker)
    worker.exchange("ready", {})
    loop = StepLoop(executor, Profiler(None if folder is None else str(Path(folder, f"host-{rank}"))))
    _LOG.info("host %d of %d is ready", rank, spec.config.hosts.num_hosts)
    worker.serve(loop.stats)
    _beat(spec.beat_descriptor, SERVING_BEAT)
    loop.run(worker)


def _beat(descriptor: int, beat: bytes) -> None:
    """Show the supervisor that this process is not frozen."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(descriptor, beat)


def _end(code: int, reason: str) -> None:
    """End this process: it may be in a collective that no other host joins."""
    if code == STOPPED:
        _LOG.info("%s", reason)
    else:
        _LOG.error("%s", reason)
    exit_now(code)


if __name__ == "__main__":
    exit_now(main())
