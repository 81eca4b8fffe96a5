"""The limit on open files and sockets of this process."""

from __future__ import annotations

import logging
import resource
from typing import Final

_log = logging.getLogger(__name__)

_NUM_OTHERS: Final = 256
"""Upper bound of files that a server opens besides its connections."""


def allow_connections(max_connections: int) -> None:
    """Raise the soft limit to what `max_connections` need, as far as the hard limit allows.

    Shells often set 1024. Without a free descriptor a connection is not refused: it waits in the kernel's queue.
    """
    wanted = max_connections + _NUM_OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible < wanted:
        _log.warning(
            "%d connections (--max-connections) need %d file descriptors, this process may have %d (ulimit -n)",
            max_connections,
            wanted,
            possible,
        )
