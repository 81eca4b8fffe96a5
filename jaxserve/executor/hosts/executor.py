"""The executor of the leader: broadcasts every plan, then runs it on its own devices like a LocalExecutor."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from jaxserve.config import Config
from jaxserve.errors import StartupError
from jaxserve.executor.hosts.agreement import shared_settings
from jaxserve.executor.hosts.leader import Leader
from jaxserve.executor.hosts.members import HostLostError
from jaxserve.executor.hosts.memory import memory_in_use
from jaxserve.executor.hosts.messages import HostStats, Refused, Restart, Stop
from jaxserve.executor.hosts.plans import encode_order
from jaxserve.executor.local import LocalExecutor
from jaxserve.executor.measured import Measured
from jaxserve.executor.protocol import BrokenExecutorError, Pending, Progress
from jaxserve.ipc.messages import ModelInfo
from jaxserve.ipc.stats import EngineStats
from jaxserve.runner.inputs import ResultT
from jaxserve.scheduler.plan import Buckets

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _HostsPending(Generic[ResultT]):
    """A step under way on all hosts."""

    executor: MultiHostExecutor
    local: Pending[ResultT]

    def is_done(self) -> bool:
        return self.local.is_done()

    def next_tokens(self) -> None:
        """Loops on several hosts report nothing."""

    def result(self) -> ResultT:
        try:
            return self.local.result()
        except Exception as error:  # the other hosts are in a step that cannot end, or have lost their state
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise self.executor.broken(f"a step failed on host 0: {reason}") from error


class MultiHostExecutor:
    """One model on the devices of several hosts; this process is host 0.

    A host that is gone, or a failed step, ends the engine: the other hosts cannot leave the collective that they are in.
    """

    def __init__(self, local: LocalExecutor[Any, Any], leader: Leader) -> None:
        self._local = local
        self._leader = leader
        self._num_steps = 0
        self._num_counted_bytes = 0
        self._memory = Measured(memory_in_use)
        self.model_info: ModelInfo = local.model_info
        self.buckets: Buckets = local.buckets
        self.pages = self.snapshots = None  # they would lie on several hosts
        self.weights = None  # all hosts would have to change theirs before the same step
        self.eos_token_ids: frozenset[int] = local.eos_token_ids

    @classmethod
    def start(
        cls,
        config: Config,
        model_path: Path,
        progress: Progress,
        end_process: Callable[[int], Any],
        at_stop: contextlib.ExitStack,
    ) -> MultiHostExecutor:
        """Wait for the other hosts and start with them. Raises StartupError in one line, which they get as well.

        end_process: called in another thread with an exit code when a host is gone while the engine serves. at_stop: stops the hosts
        that have joined when it is closed during the start.
        """
        leader = Leader(config.hosts, shared_settings(config))
        at_stop.callback(leader.end, Stop())

        def build() -> LocalExecutor[Any, Any]:
            leader.gather(lambda done, total: progress("hosts", done, total, ""))
            local = LocalExecutor.start(config, model_path, progress, leader)
            leader.exchange("ready", {})
            return local

        def end(reason: str) -> None:
            _LOG.error("%s: the engine ends on all hosts", reason)
            end_process(1)

        try:
            local = _first(_in_thread(build), leader)
            leader.serve(end)
        except StartupError as error:
            leader.end(Refused(str(error)))
            raise
        except BaseException:
            leader.end(Restart("host 0 could not start"))
            raise

        return cls(local, leader)

    def submit(self, plan: Any) -> Pending[Any]:
        """Start a step on all hosts. Raises BrokenExecutorError."""
        try:
            self._leader.plans.broadcast(encode_order(plan))
            self._num_steps += 1
            return _HostsPending(self, self._local.submit(plan))
        except Exception as error:
            raise self.broken(str(error)) from error

    def broken(self, reason: str) -> BrokenExecutorError:
        """Have the other hosts start again; returns the error to raise."""
        self._leader.end(Restart(reason))
        return BrokenExecutorError(reason)

    def add_stats(self, stats: EngineStats) -> None:
        """Set the fields that this executor counts, with those of all hosts."""
        self._local.add_stats(stats)
        hosts = {0: HostStats(self._num_steps, self._memory.value)} | self._leader.members.stats
        stats.host_up = {str(rank): 1 for rank in hosts}
        stats.host_steps = {str(rank): numbers.num_steps for rank, numbers in hosts.items()}
        stats.host_memory_bytes = {str(rank): numbers.memory_bytes for rank, numbers in hosts.items()}
        total = self._leader.plans.num_bytes
        stats.host_broadcast_bytes, self._num_counted_bytes = total - self._num_counted_bytes, total

    def profile(self, is_on: bool) -> None:
        """Begin or end the profiles of the other hosts."""
        try:
            self._leader.plans.broadcast(encode_order("start_profile" if is_on else "stop_profile"))
        except HostLostError as error:
            raise self.broken(str(error)) from error

    def close(self) -> None:
        """Stop the workers: the server ends."""
        self._leader.end(Stop())
        self._leader.close()
        self._local.close()


def _in_thread(work: Callable[[], LocalExecutor[Any, Any]]) -> Future[LocalExecutor[Any, Any]]:
    """Run `work` in a daemon thread: it may hang in a collective that another host never joins."""
    done: Future[LocalExecutor[Any, Any]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="hosts-start", daemon=True).start()
    return done


def _first(built: Future[LocalExecutor[Any, Any]], leader: Leader) -> LocalExecutor[Any, Any]:
    """Return the built executor. Raises StartupError if a host is gone, or cannot start, before."""
    waiting: set[Future[Any]] = {built, leader.failed}
    wait(waiting, return_when=FIRST_COMPLETED)
    if not built.done():
        raise leader.failed.result()
    return built.result()
