"""`jaxserve serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse

from jaxserve.cli.flags import add_flags, config_from_flags
from jaxserve.runtime.devices import divide_devices
from jaxserve.runtime.environment import child_environment
from jaxserve.runtime.spawn import spawned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal or a failure ends the server; returns its exit code."""
    config = config_from_flags(arguments)
    environment = child_environment()
    first = divide_devices(config.parallel, environment)[0]
    with spawned({**environment, **first.variables}, first.cores) as engine:
        from jaxserve.runtime.server import run_serve  # while the engine process imports jax: both take seconds

        return run_serve(config, engine=engine)
