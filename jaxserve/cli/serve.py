"""`jaxserve serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import contextlib

from jaxserve.cli.flags import add_flags, config_from_flags
from jaxserve.runtime.devices import divide_devices
from jaxserve.runtime.environment import engine_environment
from jaxserve.runtime.spawn import spawned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve, or compute for another host's server, until a signal or a failure ends it; returns the exit code."""
    config = config_from_flags(arguments)
    if config.hosts.rank:
        from jaxserve.runtime.host_supervisor import run_host

        return run_host(config)
    with contextlib.ExitStack() as hosts:
        if config.hosts.placement == "ray":
            from jaxserve.runtime.ray_hosts import placed_hosts

            config = hosts.enter_context(placed_hosts(config))
        environment = engine_environment()
        first = divide_devices(config.parallel, environment)[0]
        with spawned({**environment, **first.variables}, first.cores) as engine:
            from jaxserve.runtime.server import run_serve  # while the engine process imports jax: both take seconds

            return run_serve(config, engine=engine)
