"""`jaxserve chat`: a conversation in the terminal, or one answer to piped text."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.tools.terminal import client_options
from jaxserve.tools.terminal.chat import Chat, Conversation

EXAMPLES = """\
examples:
  jaxserve chat                                      the server on this machine
  jaxserve chat ./model.gguf -- --max-model-len 4096 starts a server and stops it at the end
  jaxserve chat --url http://gpu:8000 --verbose      any server with OpenAI's API
  git diff | jaxserve chat --system 'Review this.'   one answer to piped text

in the chat: /help lists the commands, Ctrl-C stops a reply, Ctrl-D ends
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--system", metavar="TEXT", help="system prompt; /system changes it")
    client_options.add_arguments(parser)


def edit_lines() -> None:
    """Give `input` line editing and history, and make a paste of several lines one message."""
    with contextlib.suppress(ImportError):  # a Python built without it
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off


def run(arguments: argparse.Namespace, serve_words: Sequence[str]) -> int:
    """Chat until the user ends it; returns 1 if there is no server or a piped question gets no answer, else 0."""
    question = None if sys.stdin.isatty() else client_options.read_stdin()
    if question is not None and not question.strip():
        raise ConfigError("no question: standard input is empty, and no terminal")

    def work(session: client_options.Session) -> None:
        chat = Chat(
            remote=session.remote,
            model=session.model,
            runner=session.runner,
            screen=session.screen,
            complain=client_options.complain,
            is_verbose=arguments.verbose and question is None,
            conversation=Conversation(arguments.system),
        )
        if question is None:
            edit_lines()
            chat.screen.remark(f"{session.model} at {session.remote.url}; /help lists the commands, Ctrl-D ends")
            chat.run(input)
            return
        client_options.report(chat.ask(question), is_verbose=arguments.verbose)

    return client_options.run(arguments, serve_words, work)
