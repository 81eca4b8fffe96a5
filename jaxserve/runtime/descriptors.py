"""How many files and sockets this process may have open."""

from __future__ import annotations

import logging
import resource
from typing import Final

_log = logging.getLogger(__name__)

_NUM_OTHERS: Final = 256
"""What a server opens besides its connections, generously."""


def allow_connections(max_connections: int) -> None:
    """Raise the soft limit of this process as far as `max_connections` need and the hard one lets us.

    Shells often give 1024. Without a descriptor a connection is not even refused: it waits in the kernel.
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
