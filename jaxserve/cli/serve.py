"""`jaxserve serve`: serve a model, or several, over HTTP."""

from __future__ import annotations

import argparse
import contextlib

from jaxserve.cli.flags import add_flags, add_model_flag, configs_from_flags
from jaxserve.runtime.environment import engine_environment
from jaxserve.runtime.models.model_devices import divide_among_models
from jaxserve.runtime.spawn import spawned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve, or compute for another host's server, until a signal or a failure ends it; returns the exit code."""
    config, *others = configs_from_flags(arguments)
    if config.hosts.rank:
        from jaxserve.runtime.host_supervisor import run_host

        return run_host(config)
    with contextlib.ExitStack() as hosts:
        if config.hosts.placement == "ray":
            from jaxserve.runtime.ray_hosts import placed_hosts

            config = hosts.enter_context(placed_hosts(config))
        environment = engine_environment()
        first = divide_among_models([config, *others], environment)[0].devices[0]
        with spawned({**environment, **first.variables}, first.cores) as engine:
            from jaxserve.runtime.server import run_serve  # while the engine process imports jax: both take seconds

            return run_serve(config, others, engine=engine)
