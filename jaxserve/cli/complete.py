"""`jaxserve complete`: the model's continuation of a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.tools.terminal import client_options
from jaxserve.tools.terminal.reply import receive

DEFAULT_MAX_TOKENS = 128

EXAMPLES = """\
examples:
  jaxserve complete 'Once upon a time'               the server on this machine
  jaxserve complete 'def add(a, b):' --stop 'def'    until the next function would begin
  jaxserve complete - ./model.gguf < prompt.txt      starts a server; `-` or nothing: the text is piped in
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("text", nargs="?", default="-", metavar="TEXT", help="text to continue; `-`: stdin (default)")
    client_options.add_arguments(parser)
    parser.set_defaults(max_tokens=DEFAULT_MAX_TOKENS)


def run(arguments: argparse.Namespace, serve_words: Sequence[str]) -> int:
    """Print the continuation; returns 1 if the server fails, else 0."""
    if arguments.text == "-" and sys.stdin.isatty():
        raise ConfigError("no text: `jaxserve complete TEXT`, or pipe it in")
    text = client_options.read_stdin() if arguments.text == "-" else arguments.text
    if not text:
        raise ConfigError("no text to continue: it is empty")

    def work(session: client_options.Session) -> None:
        deltas = session.remote.stream("/v1/completions", {"model": session.model, "prompt": text})
        client_options.report(receive(session.runner, deltas, session.screen), is_verbose=arguments.verbose)

    return client_options.run(arguments, serve_words, work)
