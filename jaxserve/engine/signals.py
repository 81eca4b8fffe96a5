"""The signals of an engine process.

Python's handlers run in the main thread, between two of its own instructions, so not while that hangs in a device. The numbers
of signals go through a pipe at once, and a thread reads them from there.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


class Signals:
    """SIGTERM stops the engine, SIGUSR1 writes its flight record, and SIGINT is ignored."""

    def __init__(self) -> None:
        """Call it in the main thread."""
        self._reader, numbers = os.pipe()
        os.set_blocking(numbers, False)
        self.stop_descriptor, self._stop_writer = os.pipe()
        """Readable after SIGTERM."""
        self._stop = threading.Event()
        self.on_record: Callable[[], None] = lambda: None
        """Called at SIGUSR1, in another thread."""
        signal.set_wakeup_fd(numbers, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda number, frame: self._stop.set())
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._read, name="signals", daemon=True).start()

    def should_stop(self) -> bool:
        """Return True after SIGTERM."""
        return self._stop.is_set()

    def _read(self) -> None:
        while True:
            numbers = os.read(self._reader, 64)
            if signal.SIGTERM in numbers:
                self._stop.set()
                os.write(self._stop_writer, b"x")
            if signal.SIGUSR1 in numbers:
                self.on_record()
