"""Pauses, sleep, and updates of the weights: the operator's commands that end between two steps.

They run one after the other, each in these phases. The engine's other work goes on meanwhile: steps in the first one, and
messages and heartbeats always.

    prepare    another thread reads the new weights beside those that serve, or copies these to host memory
    quiesce    by the command's mode, until no step is in flight:
                   keep   no further step starts; running requests are kept
                   wait   running requests end; no waiting request starts, not even one that was preempted meanwhile
                   abort  every request ends with an error
    apply      the change itself; the prefix cache is emptied, and kept requests compute all of their tokens again

So the KV of a request, and the pages that it shares, are always those of one version of the weights. Tiers below the device forget
pages of the version before, or, if they outlive the engine or other engines read them, keep them under hashes that no request of the new
version has. Sleep leaves the tiers as they are; level 2 gives the host memory of theirs back.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor as Threads
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from jaxserve.engine.adapters import AdapterPlaces
from jaxserve.errors import (
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestError,
    StartupError,
    UnavailableError,
    invalid,
)
from jaxserve.executor.protocol import WeightStore
from jaxserve.flight.flight_recorder import FlightRecorder
from jaxserve.ipc.messages import (
    AddRequest,
    Command,
    CommandOptions,
    EngineState,
    ErrorInfo,
    LoadedAdapter,
    RequestOutput,
)
from jaxserve.kv.tiers.tiers import KVTiers
from jaxserve.scheduler.admission import error_info
from jaxserve.scheduler.base import BaseScheduler
from jaxserve.types import place_of

_log = logging.getLogger(__name__)

OnDone = Callable[[ErrorInfo | None, EngineState], None]
"""Called once at the end of a command, with its error."""

_SLEEPING: Final = error_info(UnavailableError("The engine is sleeping. Please retry later."))
_UNLOADED: Final = error_info(ModelNotFoundError("The adapter of this request was unloaded.", param="model"))
_ABORTED: Final = error_info(UnavailableError("The operator ended all requests. Please retry later."))
_FAILED: Final = InternalError("The command failed; the engine's log has the reason.")
_QUIESCING: Final = frozenset({"pause", "sleep", "update_weights"})
_NAMES: Final = _QUIESCING | {
    "resume",
    "wake_up",
    "engine_state",
    "load_adapter",
    "unload_adapter",
    "dump_flight_record",
}


@dataclass(slots=True)
class _Change:
    """A command under way."""

    command: Command
    on_done: OnDone
    prepared: Future[Callable[[], None]] | None = None
    """The function that applies the change, once it is prepared."""
    is_quiescing: bool = False


class EngineControl:
    """The commands of one engine that wait or run, and the state that they have led to."""

    def __init__(
        self,
        scheduler: BaseScheduler[Any, Any, Any],
        weights: WeightStore | None,
        threads: Threads | None = None,
        *,
        adapters: AdapterPlaces | None = None,
        tiers: KVTiers | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        """weights: None if those of this executor cannot change. threads: read new weights; None: one thread of its own.

        adapters: None rejects none, and loads none. tiers: hold pages of the weights that serve. flight: None
        refuses to write flight records.
        """
        self.adapters = adapters
        self._tiers = tiers
        self._weights_name = ""
        """Stands for the content of the weights in the hashes of shared pages; empty for those of the start."""
        self._flight = flight
        self._scheduler = scheduler
        self._weights = weights
        self._threads = threads or ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._changes: deque[_Change] = deque()
        self.state = EngineState()

    @property
    def is_busy(self) -> bool:
        """True if a command has not ended."""
        return bool(self._changes)

    @property
    def holds_steps(self) -> bool:
        """True if no step may be dispatched."""
        first = self._changes[0] if self._changes else None
        is_stopping = first is not None and first.is_quiescing and first.command.options.mode != "wait"
        return self.state.is_paused or is_stopping

    def begin(self, command: Command, on_done: OnDone) -> bool:
        """Start or queue a command; returns False if it is none of these."""
        if command.name not in _NAMES:
            return False
        self._changes.append(_Change(command, on_done))
        return True

    def rejection(self, message: AddRequest) -> ErrorInfo | None:
        """Return the error of a request that cannot be queued now."""
        if self.adapters is not None and not self.adapters.has(message.adapter):
            return _UNLOADED
        return _SLEEPING if self.state.is_sleeping else None

    def poll(self, num_in_flight: int) -> list[RequestOutput]:
        """Continue the oldest command; returns the ends of the requests that it aborts. Call it before every step."""
        outputs: list[RequestOutput] = []
        while self._changes:
            change = self._changes[0]
            try:
                if not self._advance(change, num_in_flight, outputs):
                    break
                error = None
            except RequestError as failure:
                error = error_info(failure)
            except StartupError as failure:
                error = error_info(InvalidRequestError(str(failure)))
            except Exception:
                _log.exception("%s failed", change.command.name)
                error = error_info(_FAILED)
            _forget_adapters(self._weights, self.adapters, self._scheduler)
            change.prepared = None  # an error, the frames of its traceback and this future would keep half-read weights
            self._changes.popleft()
            self._scheduler.starts_requests = True
            change.on_done(error, self.state)
        return outputs

    def _advance(self, change: _Change, num_in_flight: int, outputs: list[RequestOutput]) -> bool:
        """Continue a command; returns True at its end. Raises the error of one that fails."""
        if change.prepared is None:
            change.prepared = self._prepare(change.command)
        if not change.prepared.done():
            return False
        apply = change.prepared.result()
        if change.command.name in _QUIESCING:
            mode = change.command.options.mode
            self._scheduler.starts_requests = mode != "wait"
            if mode == "abort" and not change.is_quiescing:
                outputs += self._scheduler.abort_all(_ABORTED)
            change.is_quiescing = True
            awaits_requests = mode == "wait" and not self.state.is_paused
            if num_in_flight or (awaits_requests and self._scheduler.running):
                return False
        apply()
        return True

    def _prepare(self, command: Command) -> Future[Callable[[], None]]:
        """Begin to prepare a change; returns the function that applies it."""
        state, options = self.state, command.options
        match command.name:
            case "load_adapter":
                places = self._places()  # before the requests are asked: texts to embed have no adapters
                used = {request.adapter for request in self._scheduler.requests.values()}
                adapter = places.choose(options.adapter, options.source, used)
                return self._threads.submit(self._load_adapter, adapter)
            case "unload_adapter":
                return _ready(lambda: self._places().remove(options.adapter))
            case "update_weights":
                return self._threads.submit(self._load, options)
            case "dump_flight_record":
                return self._threads.submit(lambda: partial(self._set, flight_record=_write_record(self._flight)))
            case "wake_up" if state.is_sleeping:
                return self._threads.submit(lambda: self._waking(self._store().restore()))
            case "sleep" if not state.is_sleeping:
                return self._threads.submit(self._sleeping, options.sleep_level)
            case "pause":
                return _ready(lambda: self._set(is_paused=True))
            case "resume" if state.is_sleeping:
                raise InvalidRequestError("The engine is sleeping: /wake_up ends that.")
            case "resume":
                return _ready(lambda: self._set(is_paused=False))
        return _ready(lambda: None)

    def _places(self) -> AdapterPlaces:
        if self.adapters is None:
            raise InvalidRequestError("This engine has no adapters: it embeds.")
        return self.adapters

    def _load_adapter(self, adapter: LoadedAdapter) -> Callable[[], None]:
        if self._weights is None:
            raise InvalidRequestError("Adapters cannot be loaded while this engine serves: it has several hosts.")
        install = self._weights.load_adapter(place_of(adapter.number), adapter.name, adapter.source)

        def apply() -> None:
            install()
            self._places().add(adapter)

        return apply

    def _load(self, options: CommandOptions) -> Callable[[], None]:
        store = self._store()
        install = store.load_tensors(options.tensors) if options.tensors else store.load(options.model)
        shared = self._tiers is not None and self._tiers.are_shared
        name = _name_of_new(store, options, self._weights_name) if shared else None

        def apply() -> None:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
            install()
            if name is not None:
                self._weights_name = name
            # Shared tiers keep the pages of the weights before, under hashes of their own; other tiers forget them.
            if self._tiers is not None:
                self._scheduler.reset_prefix_cache(weights_name=name)
            self._set(weight_version=self.state.weight_version + 1)
            _log.info("weights: version %d, from %s", self.state.weight_version, options.tensors or options.model)

        return apply

    def _sleeping(self, level: int) -> Callable[[], None]:
        store = self._store()
        if level not in (1, 2):
            raise invalid("level", f"must be 1 or 2, got {level}")
        discard = store.discard(keeps_copy=level == 1)

        def apply() -> None:
            self._scheduler.reset_prefix_cache(reset_running_requests=True)
            discard()
            if level == 2 and self._tiers is not None:
                self._tiers.release_memory()
            self._set(is_paused=True, is_sleeping=True)

        return apply

    def _waking(self, restore: Callable[[], bool]) -> Callable[[], None]:
        def apply() -> None:
            is_same = restore()
            if not is_same and self._tiers is not None and self._tiers.are_shared:
                self._weights_name = secrets.token_hex(32)
                self._scheduler.reset_prefix_cache(weights_name=self._weights_name)
            self._set(is_paused=False, is_sleeping=False)

        return apply

    def _store(self) -> WeightStore:
        if self._weights is None:
            raise InvalidRequestError("The weights of this engine cannot change: it has several hosts (--num-hosts).")
        return self._weights

    def _set(self, **values: int | bool | str) -> None:
        self.state = msgspec.structs.replace(self.state, **values)


def _name_of_new(store: WeightStore, options: CommandOptions, name: str) -> str:
    """Return what stands for the content of new weights, as `name` for that of those that serve: see `_weights_name`."""
    content = store.new_hash()
    if content is None:  # the files have changed while they were read: no other weights are known to be these
        return secrets.token_hex()
    if options.tensors:  # the others stay
        content = f"{name}+{content}"
    elif content == store.start_hash():
        return ""
    return hashlib.sha256(content.encode()).hexdigest()


def _forget_adapters(
    weights: WeightStore | None, places: AdapterPlaces | None, scheduler: BaseScheduler[Any, Any, Any]
) -> None:
    """Let the store forget adapters that were unloaded and that no request uses any more."""
    if weights is not None and places is not None:
        loaded = {place_of(adapter.number) for adapter in places.loaded}
        weights.keep_adapters(loaded | {request.adapter for request in scheduler.requests.values()})


def _ready(apply: Callable[[], None]) -> Future[Callable[[], None]]:
    done: Future[Callable[[], None]] = Future()
    done.set_result(apply)
    return done


def _write_record(flight: FlightRecorder | None) -> str:
    """Return the path of a new flight record. Raises InvalidRequestError."""
    if flight is None:
        raise InvalidRequestError(
            "This engine has no flight recorder: --flight-recorder-steps is 0, it has KV tiers, reads images or embeddings, embeds, or returns experts."
        )
    try:
        return str(flight.write("command"))
    except OSError as error:
        raise InvalidRequestError(f"The flight record cannot be written: {error.strerror}.") from error
