"""The last act of a Ray cluster's head: `python -m jaxserve.ray.await_workers SECONDS` returns when no other node is alive.

Nodes cannot go on without their head, and a head never becomes idle, so one that drains as they do takes all of its time.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

_POLL_S: Final = 1.0

Nodes = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns the nodes of the cluster, as `ray.nodes` does."""


def await_workers(nodes: Nodes, timeout_s: float, poll_s: float = _POLL_S) -> bool:
    """Return True when only one node is alive, False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while sum(node["Alive"] for node in nodes()) > 1:
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def main() -> None:
    """Wait for the nodes of the cluster that this node belongs to."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    await_workers(ray.nodes, float(sys.argv[1]))


if __name__ == "__main__":
    main()
