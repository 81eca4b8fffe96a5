"""Options of `jaxserve chat` and `jaxserve complete` for the server and for sampling."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.runtime.environment import base_url, child_environment, environment_api_key
from jaxserve.tools.client import NoServerError, Remote, RemoteError
from jaxserve.tools.terminal.local_server import LocalServer, ServerEndedError, local_server
from jaxserve.tools.terminal.reply import Reply, Screen

NOT_OF_OWN_SERVER = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "api_key_file", "admin_socket")
"""Settings of the environment for a public server, which the own one must not get: it has one user and one key."""
SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A server that answers, and the screen for its replies."""

    remote: Remote
    model: str
    runner: asyncio.Runner
    screen: Screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "path",
        nargs="?",
        metavar="MODEL",
        help="start a server with this model (GGUF file, directory or hub id) and stop it at the end; "
        "options of `jaxserve serve` may follow after `--`",
    )
    server.add_argument("--url", help="ask this server instead (default: from JAXSERVE_HOST and JAXSERVE_PORT)")
    server.add_argument("--model", metavar="NAME", help="model to ask for (default: the first one the server lists)")
    server.add_argument("--api-key", help="sent as bearer token (default: JAXSERVE_API_KEY)")
    sampling = parser.add_argument_group("sampling (defaults are the server's)")
    sampling.add_argument("--temperature", type=float, metavar="X", help="0: always the most likely token")
    sampling.add_argument(
        "--top-p", type=float, metavar="X", help="sample from the most likely tokens up to this sum of probabilities"
    )
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="longest reply")
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same reply")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end replies here; may be repeated")
    parser.add_argument("--verbose", action="store_true", help="show tokens and speed after every reply")


def run(arguments: argparse.Namespace, serve_words: Sequence[str], work: Callable[[Session], None]) -> int:
    """Do `work` with a server; returns 1 if the server fails, else 0."""
    if arguments.path and arguments.url:
        raise ConfigError(f"MODEL {arguments.path} starts a server, --url {arguments.url} names one: give one of them")
    if serve_words and not arguments.path:
        raise ConfigError("options after `--` are for the server that MODEL starts: name a model")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        with _server(arguments, serve_words) as own, asyncio.Runner() as runner:
            work(_session(arguments, own, runner))
            sys.stdout.flush()
    except RemoteError as error:
        hint = "; start one with `jaxserve serve`, or name a model here" if isinstance(error, NoServerError) else ""
        complain(f"{error}{hint}")
        return 1
    except ServerEndedError as error:
        return error.exit_code
    except BrokenPipeError:  # `jaxserve complete ... | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def complain(line: str) -> None:
    """Print one line on stderr."""
    print(f"jaxserve: error: {line}", file=sys.stderr)


def read_stdin() -> str:
    """Return all of stdin. Raises ConfigError if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin is not UTF-8: {error.reason} at byte {error.start}") from None


def report(reply: Reply, *, is_verbose: bool) -> None:
    """Print the summary of a single reply. Raises KeyboardInterrupt if Ctrl-C ended it."""
    if is_verbose:
        print(f"[{reply.summary()}]", file=sys.stderr)
    if reply.is_stopped:
        raise KeyboardInterrupt


def _session(arguments: argparse.Namespace, own: LocalServer | None, runner: asyncio.Runner) -> Session:
    options: dict[str, Any] = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.verbose:
        options["stream_options"] = {"include_usage": True}
    url = own.url if own else base_url(arguments.url)
    key = own.api_key if own else arguments.api_key or environment_api_key()
    remote = Remote(url=url, api_key=key, options=options)
    model = arguments.model or runner.run(remote.first_model())
    return Session(remote=remote, model=model, runner=runner, screen=Screen(sys.stdout))


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, serve_words: Sequence[str]) -> Iterator[LocalServer | None]:
    if arguments.path is None:
        yield None
        return
    with local_server([arguments.path, *serve_words], child_environment(NOT_OF_OWN_SERVER)) as own:
        yield own
