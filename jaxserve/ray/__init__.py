"""Replicas on Ray Serve: the optional extra `jaxserve[ray]`. `serve run jaxserve.ray:app model=...` starts it.

A replica is an actor that owns a whole `jaxserve serve` process on loopback; an ingress moves the bytes of requests and
replies between clients and replicas. Only `deployments` and `request_router` import ray; the other modules are tested
without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.ray.deployments import app as app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    if name == "app":
        from jaxserve.ray.deployments import app

        return app
    raise AttributeError(name)
