"""The engine process: `python -m jaxserve.engine.process [--preload]`, spawned by `runtime.spawn`.

Loading and compiling run in a second thread; the main thread keeps the socket, answers `Hello` with the latest progress
and rejects requests.

stdin     one line, an EngineSpec; when it ends, the parent is gone, and the engine exits
SIGTERM   stop: every request gets its terminal message, exit 0
SIGUSR1   write the flight record
SIGINT    ignored: a Ctrl-C goes to the whole process group, and the parent decides
exit      0 stopped, 1 broken or orphaned, 2 could not start (one line, sent to the clients)
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from jaxserve.config import Config
from jaxserve.engine.adapters import AdapterPlaces
from jaxserve.engine.core import EngineCore, rejected
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.signals import Signals
from jaxserve.errors import ConfigError, StartupError, UnavailableError, is_out_of_memory
from jaxserve.executor.fake.executor import FakeExecutor
from jaxserve.executor.profiler import Profiler
from jaxserve.executor.protocol import Executor, Progress
from jaxserve.flight.flight_recorder import FlightRecorder
from jaxserve.flight.record import shape_of
from jaxserve.flight.recorded_scheduler import RecordedScheduler
from jaxserve.flight.recorder import Recorder
from jaxserve.ipc.address import discard_address, remove_socket
from jaxserve.ipc.engine_spec import MAX_SPEC_BYTES, EngineSpec
from jaxserve.ipc.messages import AddRequest, Hello, ModelInfo, StartupFailed, StartupProgress, StepOutputs
from jaxserve.ipc.report import PhaseClock, StartupReport, process_start_s
from jaxserve.ipc.transport import EngineSocket, ProtocolError
from jaxserve.kv.groups import SideGroups
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_changes import PageChanges
from jaxserve.kv.tiers.chains import shared_chains
from jaxserve.kv.tiers.snapshots import Snapshots
from jaxserve.kv.tiers.tiers import KVTiers
from jaxserve.log import configure_logging, flush_or_drop
from jaxserve.parent import die_with_parent
from jaxserve.scheduler.admission import error_info
from jaxserve.scheduler.embedding import EmbedScheduler
from jaxserve.scheduler.plan import Buckets
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.structured.compiling import load_ll_tokenizer
from jaxserve.structured.masks import GrammarMasks
from jaxserve.tokenizer.tokenizer import load_eos_token_ids
from jaxserve.types import PRELOAD_FLAG

E = TypeVar("E")


_POLL_S: Final = 0.05
_GREETING_S: Final = 2.0
"""Seconds that the report of a failure waits for the first client."""

_LOADING: Final = error_info(UnavailableError("The model is still loading. Please retry later."))


def start_executor(build: Callable[[Progress], E], socket: EngineSocket, should_stop: Callable[[], bool]) -> E | None:
    """Return the result of `build`; None if `should_stop` first (then exit the process: the thread still runs).

    Raises StartupError for every error of `build`, after it was sent to the clients.
    """
    reports: SimpleQueue[StartupProgress] = SimpleQueue()
    built: Future[E] = Future()

    def run() -> None:
        try:
            built.set_result(
                build(lambda phase, done, total, detail: reports.put(StartupProgress(phase, done, total, detail)))
            )
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=run, name="startup", daemon=True).start()
    latest: StartupProgress | None = None
    while not should_stop():
        latest = _broadcast_progress(reports, socket) or latest
        _answer(socket, latest, _POLL_S)
        if built.done():
            _broadcast_progress(reports, socket)
            error = built.exception()
            if error is None:
                return built.result()
            raise _failure(error, socket) from error
    return None


def _broadcast_progress(reports: SimpleQueue[StartupProgress], socket: EngineSocket) -> StartupProgress | None:
    """Send the newest line of each phase; returns the last."""
    by_phase: dict[str, StartupProgress] = {}
    while not reports.empty():
        progress = reports.get()
        by_phase.pop(progress.phase, None)
        by_phase[progress.phase] = progress
    for progress in by_phase.values():
        socket.broadcast(progress)
    return next(reversed(by_phase.values()), None)


def _answer(socket: EngineSocket, latest: StartupProgress | None, timeout_s: float) -> None:
    for client, message in socket.receive(timeout_s):
        if isinstance(message, ProtocolError):
            _log.error("ignored a frame: %s", message)
        elif isinstance(message, AddRequest):
            socket.send(client, StepOutputs([rejected(message.request_id, _LOADING)]))
        elif isinstance(message, Hello) and latest is not None:
            socket.send(client, latest)


def _failure(error: BaseException, socket: EngineSocket) -> StartupError:
    """Send the clients the reason of a failed start; waits a moment for the first one to connect."""
    if isinstance(error, StartupError):
        reason = error
    elif is_out_of_memory(error):  # where it happened helps no one
        reason = StartupError(f"the engine could not start: out of memory ({_first_line(error)}); {_TOO_LARGE}")
    else:
        _log.error("the engine could not start", exc_info=error)
        reason = StartupError(f"the engine could not start: {type(error).__name__}: {_first_line(error)}")
    if not socket.has_clients:
        _answer(socket, None, _GREETING_S)
    socket.broadcast(StartupFailed(str(reason)))
    return reason


_TOO_LARGE: Final = (
    "`jaxserve plan MODEL` says what fits; --kv-cache-memory, --max-model-len and --quantization make it smaller"
)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no details")


_log = logging.getLogger(__name__)

_LINGER_S: Final = 1.0
"""Time for the delivery of the last messages."""


def main() -> int:
    """Run one engine; returns the exit code."""
    die_with_parent()
    signals = Signals()
    if PRELOAD_FLAG in sys.argv:
        preload()
    try:
        line = sys.stdin.buffer.readline(MAX_SPEC_BYTES)
        if not line:
            return 1  # the parent needs no engine any more
        spec = EngineSpec.parse(line)
        configure_logging(spec.config.server.log_level, spec.config.server.log_format)
        socket = EngineSocket(spec.address)
    except StartupError as error:
        print(f"engine: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    watch_stdin(spec.address)
    socket.wake_on(signals.stop_descriptor)
    try:
        return serve(spec, socket, signals)
    except StartupError as error:
        if not socket.has_clients:  # else a client reports it to the user
            _log.error("%s", error)
        return error.exit_code
    finally:
        socket.close(_LINGER_S)
        remove_socket(spec.address)


def preload() -> None:
    """Import the modules of an executor for real models.

    They make hundreds of thousands of objects that stay. Garbage collections would look through them several times meanwhile,
    which takes a fifth of the import's time, and again while serving.
    """
    gc.disable()
    with contextlib.suppress(ImportError):  # raised again where it can be reported
        importlib.import_module("jaxserve.executor.local")
    gc.freeze()
    gc.enable()


def serve(spec: EngineSpec, socket: EngineSocket, signals: Signals) -> int:
    clock = PhaseClock()
    at_stop = contextlib.ExitStack()
    has_late_programs = spec.config.compile.warmup == "auto"
    build = partial(build_executor, spec, clock=clock, has_late_programs=has_late_programs, at_stop=at_stop)
    reader = ThreadPoolExecutor(1, thread_name_prefix="end-tokens")
    ends = reader.submit(tokenizer_ends, spec)
    reader.shutdown(wait=False)
    executor = start_executor(build, socket, signals.should_stop)
    if executor is None:
        at_stop.close()
        return 0
    made = executor.model_info.startup
    report = StartupReport([*spec.phases, *clock.spans, *made.phases], made.programs)
    model_info = msgspec.structs.replace(executor.model_info, startup=report)
    try:
        core = build_core(spec, executor, ends.result)
    except StartupError as error:
        raise _failure(error, socket) from error
    if core.flight is not None:
        signals.on_record = partial(core.flight.try_to_write, "signal")
    code = EngineLoop(core, socket, model_info).run(signals.should_stop)
    if code == 0:  # else the engine is started again, and other hosts must not take this for the end
        executor.close()
    return code


def build_executor(
    spec: EngineSpec,
    progress: Progress,
    clock: PhaseClock | None = None,
    *,
    has_late_programs: bool = False,
    at_stop: contextlib.ExitStack | None = None,
) -> Executor[Any, Any]:
    """Return the executor of `spec`. Adds the time from the start of this process to `clock`.

    has_late_programs: programs may be compiled after the return, in a thread that the end of the process must not wait for.
    at_stop: gets what to do if this process stops before the return.
    """
    clock = clock or PhaseClock()
    if spec.executor == "fake":
        progress("load", 1, 1, "fake")
        clock.add("engine", process_start_s())
        return FakeExecutor.start(spec.config, spec.fake)
    from jaxserve.engine.draft_tokenizer import with_draft_path
    from jaxserve.executor.local import LocalExecutor  # here, so that a fake engine needs no jax

    clock.add("engine", process_start_s())
    config = with_draft_path(spec.config, Path(spec.model_path))
    if config.hosts.num_hosts > 1:
        from jaxserve.executor.hosts.executor import MultiHostExecutor

        return MultiHostExecutor.start(
            config, Path(spec.model_path), progress, exit_now, at_stop or contextlib.ExitStack()
        )
    return LocalExecutor.start(
        config, Path(spec.model_path), progress, reports_tokens=True, has_late_programs=has_late_programs
    )


def build_core(
    spec: EngineSpec, executor: Executor[Any, Any], ends: Callable[[], Iterable[int]] | None = None
) -> EngineCore:
    """Return the core with the scheduler of the executor's task.

    A reply ends, as in vLLM, at the end tokens of the model's configs and of its tokenizer. Only the scheduler knows them: the device
    gets them with each request, so no program depends on them. ends: returns `tokenizer_ends`; None: they are read here.
    """
    model_info, config = executor.model_info, spec.config
    depth, profiler = int(config.scheduler.overlap), Profiler(config.server.profile_dir, executor.profile)
    if model_info.embedding is not None:
        texts = EmbedScheduler(config.scheduler, executor.buckets, model_info.max_model_len, model_info.vocab_size)
        return EngineCore(texts, executor, depth=depth, profiler=profiler)
    of_tokenizer = tokenizer_ends(spec) if ends is None else ends()
    eos_token_ids = executor.eos_token_ids.union(end for end in of_tokenizer if end < model_info.vocab_size)
    changes = PageChanges() if spec.publishes_pages else None
    kv = KVManager(
        model_info.num_kv_blocks,
        model_info.block_size,
        model_info.max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        changes=changes,
        num_ranks=config.parallel.data_parallel_size,
        groups=side_groups(config, model_info, executor.buckets),
        chains=shared_chains(model_info.block_size, len(config.model.adapters)) if config.tiers.are_shared else None,
    )
    tiers = open_tiers(config, kv, executor, changes)
    parts = (
        config.scheduler,
        kv,
        executor.buckets,
        model_info.max_model_len,
        eos_token_ids,
        model_info.vocab_size,
    )
    grammars = GrammarMasks(partial(load_ll_tokenizer, Path(spec.model_path)), model_info.vocab_size, config.structured)
    flight = None
    further = model_info.images, model_info.prompt_embeds, model_info.routed_experts
    if config.recorder.flight_recorder_steps and tiers is None and not any(further):
        recorder = Recorder(config.recorder.flight_recorder_steps, kv.block_size, 1 + len(model_info.windows))
        scheduler: Scheduler = RecordedScheduler(recorder, *parts, grammars=grammars)
        shape = shape_of(config, model_info, executor.buckets, eos_token_ids)
        flight = FlightRecorder(recorder, shape, config.model.model, config.recorder.flight_recorder_dir)
    else:
        images, embeds, routed = further
        scheduler = Scheduler(
            *parts, grammars=grammars, tiers=tiers, images=images, prompt_embeds=embeds, routed_experts=routed
        )
    return EngineCore(
        scheduler,
        executor,
        depth=depth,
        profiler=profiler,
        page_changes=changes,
        tiers=tiers,
        adapters=AdapterPlaces(config.model.adapters, config.model.num_adapter_places),
        flight=flight,
    )


def tokenizer_ends(spec: EngineSpec) -> tuple[int, ...]:
    """Return the end tokens of the model's tokenizer; none of a fake model. Raises CheckpointError.

    For a GGUF file it takes up to a second of reading, which can be done while the executor starts.
    """
    return () if spec.executor == "fake" else load_eos_token_ids(Path(spec.model_path))


def side_groups(config: Config, model_info: ModelInfo, buckets: Buckets) -> SideGroups:
    """Return the windows and the recurrent states of a model."""
    return SideGroups.of_sizes(
        model_info.windows,
        model_info.num_state_slots,
        model_info.block_size,
        max(buckets.mixed),
        keeps_snapshots=config.cache.enable_prefix_caching,
        num_ranks=config.parallel.data_parallel_size,
    )


def open_tiers(
    config: Config, kv: KVManager, executor: Executor[Any, Any], changes: PageChanges | None = None
) -> KVTiers | None:
    """Return the tiers of the settings below `kv`; None without any. Raises ConfigError."""
    if not config.tiers.has_stores:
        return None
    if executor.pages is None:
        raise ConfigError(f"{', '.join(config.tiers.settings)}: this executor copies no KV pages")
    snapshots = None if executor.snapshots is None else Snapshots(executor.snapshots, kv.groups.states)
    tiers = KVTiers(config.tiers, kv.pool, executor.pages, kv.block_size, changes, snapshots)
    tiers.follow(kv)
    return tiers


def watch_stdin(address: str | None) -> None:
    """Exit when stdin ends: then the parent is gone. address: the socket to remove before."""

    def wait_for_end() -> None:
        descriptor = sys.stdin.fileno()
        while os.read(descriptor, 4096):
            pass
        if address is not None:
            discard_address(address)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent-watch", daemon=True).start()


def exit_now(code: int) -> NoReturn:
    """Exit without waiting for threads that load, compile or hang in a device call."""
    logging.shutdown()
    flush_or_drop()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
