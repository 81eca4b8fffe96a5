"""The flight recorder of an engine process: writes what it keeps on command, by signal, and when the engine crashes."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from pathlib import Path

from jaxserve.config.recorder import DEFAULT_FLIGHT_DIRECTORY
from jaxserve.flight.dump import make_record
from jaxserve.flight.record import EngineShape, write_record
from jaxserve.flight.recorder import Recorder

_log = logging.getLogger(__name__)


class FlightRecorder:
    """Writes what a recorder keeps into a directory. Any thread may call all methods."""

    def __init__(self, recorder: Recorder, shape: EngineShape, model: str, directory: str | None) -> None:
        self._recorder = recorder
        self._shape = shape
        self._model = model
        self._directory = Path(directory or DEFAULT_FLIGHT_DIRECTORY)
        self._lock = threading.Lock()
        self._num_written = 0

    def write(self, reason: str) -> Path:
        """Write a record and return its path. Raises OSError."""
        try:
            directory = self._directory.expanduser()
        except RuntimeError as error:
            raise FileNotFoundError(errno.ENOENT, "no home directory: set --flight-recorder-dir") from error
        with self._lock:
            record = make_record(self._recorder, self._shape, model=self._model, reason=reason)
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            self._num_written += 1
            # With the host: replicas may share a directory, and in containers their processes have the same numbers.
            name = f"{stamp}-{socket.gethostname()}-{os.getpid()}-{self._num_written}"
            path = write_record(record, directory, name)
        _log.info("wrote the flight record of %d steps to %s (%s)", record.num_steps, path, reason)
        return path

    def try_to_write(self, reason: str) -> None:
        """Write a record; a failure is logged."""
        try:
            self.write(reason)
        except Exception:  # a crash has a reason of its own, which this one must not hide
            _log.exception("the flight record could not be written")
