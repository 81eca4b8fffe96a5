"""`jaxserve complete`: what a model writes behind a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxserve.cli import ask
from jaxserve.errors import ConfigError
from jaxserve.tools.terminal.receiving import receive

DEFAULT_MAX_TOKENS = 128

EXAMPLES = """\
examples:
  jaxserve complete 'Once upon a time'               the server on this machine
  jaxserve complete 'def add(a, b):' --stop 'def'    until it would begin the next function
  jaxserve complete - ./model.gguf < prompt.txt      a server of its own; `-` or nothing: the text is piped in
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("text", nargs="?", default="-", metavar="TEXT", help="what comes before; `-`: stdin (default)")
    ask.add_arguments(parser)
    parser.set_defaults(max_tokens=DEFAULT_MAX_TOKENS)


def run(arguments: argparse.Namespace, serve_words: Sequence[str]) -> int:
    """Exit code 0, or 1 when the server fails."""
    if arguments.text == "-" and sys.stdin.isatty():
        raise ConfigError("no text: `jaxserve complete TEXT`, or pipe it in")
    text = ask.read_stdin() if arguments.text == "-" else arguments.text

    def work(asking: ask.Asking) -> None:
        deltas = asking.remote.stream("/v1/completions", {"model": asking.model, "prompt": text})
        ask.report(receive(asking.runner, deltas, asking.screen), is_verbose=arguments.verbose)

    return ask.run(arguments, serve_words, work)
