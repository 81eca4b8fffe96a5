"""Profiles of devices and host threads, step by step, in JAX's format."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from jaxserve.errors import InvalidRequestError

_LOG = logging.getLogger(__name__)


class Profiler:
    """Takes one profile at a time, of this whole process and of the engine's other hosts."""

    def __init__(self, folder: str | None, on_change: Callable[[bool], None] = lambda is_on: None) -> None:
        """`folder`: the folder for profiles; None: profiles are refused. on_change: called with True when a profile has
        begun, and with False when it has ended.

        Profiles are in the folder HOST-PID in it: JAX names them by host and second, and several engines may share `folder`.
        """
        self._folder = folder and str(Path(folder, f"{socket.gethostname()}-{os.getpid()}"))
        self._on_change = on_change
        self._is_on = False
        self._is_lost = False
        """The last profile could not be written: JAX has dropped what it collected, and not ended its session."""

    def start(self) -> None:
        """Begin a profile. Raises InvalidRequestError if profiles are refused, or one is being taken."""
        if self._folder is None:
            raise InvalidRequestError("No profile can be taken: this server was started without --profile-dir.")
        if self._is_on:
            raise InvalidRequestError("A profile is being taken already: /stop_profile ends it.")
        from jax import profiler  # here, so that a fake engine needs no jax

        if self._is_lost:
            self._end()
        options = profiler.ProfileOptions()
        options.python_tracer_level = 0  # an event for every Python call would be most of what it shows
        profiler.start_trace(self._folder, profiler_options=options)
        self._is_on = True
        self._on_change(True)
        _LOG.info("taking a profile")

    def stop(self) -> None:
        """End the profile, and write it. Raises InvalidRequestError if none is being taken, or if it cannot be written: then it is lost."""
        if not self._is_on:
            raise InvalidRequestError("No profile is being taken: /start_profile begins one.")
        self._is_on = False
        self._on_change(False)
        self._end()
        _LOG.info("wrote a profile to %s", self._folder)

    def _end(self) -> None:
        """Let JAX end its session. Raises InvalidRequestError if it cannot write: it goes on then, without what it has collected."""
        from jax import profiler

        try:
            profiler.stop_trace()
        except RuntimeError as error:  # JAX's, for a full disk or a folder that is not writable
            self._is_lost = True
            raise InvalidRequestError(f"The profile cannot be written, and is lost: {error}") from error
        self._is_lost = False
