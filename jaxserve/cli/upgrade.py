"""`jaxserve upgrade`: start a server that replaces the running one on its port, without losing a request."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from io import FileIO

from jaxserve.cli.flags import add_flags, add_model_flag, configs_from_flags
from jaxserve.config import Config
from jaxserve.errors import ConfigError, StartupError
from jaxserve.log import report
from jaxserve.runtime.environment import engine_environment
from jaxserve.runtime.models.model_devices import divide_among_models
from jaxserve.runtime.spawn import spawned

EPILOG = """\
Give it the options of `jaxserve serve`; host, port and --uds-dir find the running server. The new server takes the port
once it is ready. Requests that have begun end where they began (--upgrade-timeout), idle connections move. If the new
server fails, the running one goes on. Both engines need memory at once: where it does not suffice, use --after-drain.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how the running server is replaced, and the settings of the new one."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    group = parser.add_argument_group("upgrade")
    group.add_argument(
        "--after-drain",
        action="store_true",
        help="load the model when the running server has finished its requests and ended its engine, for a device that "
        "holds only one; new requests wait meanwhile",
    )
    group.add_argument(
        "--detach", action="store_true", help="return once the new server has the port, and leave it in the background"
    )
    add_model_flag(parser)
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replace the running server, and serve; returns the exit code. With --detach return once the new server serves.

    Raises ConfigError for a server over several hosts.
    """
    configs = configs_from_flags(arguments)
    config = configs[0]
    if config.hosts.num_hosts > 1:
        raise ConfigError(
            f"--num-hosts {config.hosts.num_hosts}: `jaxserve upgrade` replaces a server by one on a single host (1); "
            "start the new hosts beside the old ones and move the balancer"
        )
    if not arguments.detach:
        return _serve(configs, after_drain=arguments.after_drain)
    reader, writer = os.pipe()
    child = os.fork()  # nothing runs beside this thread yet
    if child == 0:
        os.close(reader)
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        # The server is now a child of systemd, which waits for the end of no other process: it would kill this one at once.
        command = os.fdopen(writer, "wb", buffering=0)
        try:
            return _serve(configs, after_drain=arguments.after_drain, on_done=lambda: _report(command, 0))
        except StartupError as error:
            atexit.register(_report, command, error.exit_code)  # when the error has been printed
            raise
    os.close(writer)
    os.waitpid(child, 0)
    code = os.read(reader, 1)
    if not code:  # it has said why, unless a signal ended it
        message = "the new server ended before it had the port"
        report(logging.ERROR, message, plain=f"jaxserve: error: {message}")
    return code[0] if code else 1


def _report(command: FileIO, code: int) -> None:
    """Have the command that waits return `code`, unless it has ended."""
    with contextlib.suppress(BrokenPipeError, ValueError), command:
        command.write(bytes([code]))


def _serve(configs: Sequence[Config], *, after_drain: bool, on_done: Callable[[], None] = lambda: None) -> int:
    environment = engine_environment()
    first = divide_among_models(configs, environment)[0].devices[0]
    with spawned({**environment, **first.variables}, first.cores) as engine:
        from jaxserve.runtime.server import Upgrade, run_serve  # while the engine process imports jax

        return run_serve(
            configs[0], configs[1:], engine=engine, upgrade=Upgrade(after_drain=after_drain, on_done=on_done)
        )
