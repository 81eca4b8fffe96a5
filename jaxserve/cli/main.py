"""The `jaxserve` command: finds the subcommand, imports only that, and turns errors into one line and an exit code.

`jaxserve --help` imports nothing but argparse.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from argparse import _SubParsersAction
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxserve import __version__
from jaxserve.errors import ConfigError, StartupError

HELP = """\
usage: jaxserve COMMAND [OPTIONS]

JAX-native LLM inference server with an OpenAI-compatible API.

commands:
{commands}

examples:
  jaxserve serve                                       the default model, where it is installed
  jaxserve serve ./model.gguf --port 8123              a GGUF file
  jaxserve serve Qwen/Qwen3-0.6B --max-model-len 4096  a model of the Hugging Face hub
  jaxserve serve --config configs/laptop-cpu.yaml      settings from a file; flags win over it
  jaxserve chat                                        talk to the running server; `jaxserve chat MODEL` starts one
  jaxserve plan Qwen/Qwen3-0.6B --device h200          memory and speed on a device, before anything is loaded
  jaxserve bench serve --workload chat                 load a running server and report latencies

Every setting is a flag (--max-num-seqs), an environment variable (JAXSERVE_MAX_NUM_SEQS) and a file key
(max_num_seqs). `jaxserve COMMAND --help` lists the options of a command.
"""


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line with the nearest flag in it."""

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all of `words`; raises ConfigError."""
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            near = difflib.get_close_matches(unknown[0].split("=")[0], self._flags(), n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"`{self.prog} --help` lists the options"
            raise ConfigError(f"unknown option `{unknown[0]}`; {hint}")
        return arguments

    def _flags(self) -> list[str]:
        children = [action.choices.values() for action in self._actions if isinstance(action, _SubParsersAction)]
        own = [flag for action in self._actions for flag in action.option_strings]
        return own + [flag for parsers in children for parser in parsers for flag in parser._flags()]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `run` gets an empty parser and the words after the name; it imports what it needs."""

    name: str
    summary: str
    run: Callable[[Parser, Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 2 for a mistake of the user's, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        words[0] = "version"
    commands = {command.name: command for command in COMMANDS}
    if words[0] not in commands:
        near = difflib.get_close_matches(words[0], commands, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "`jaxserve --help` lists the commands"
        return _complain(f"unknown command `{words[0]}`; {hint}")
    command = commands[words[0]]
    parser = Parser(
        prog=f"jaxserve {command.name}",
        usage=f"jaxserve {command.name} [OPTIONS]",
        description=command.summary,
        allow_abbrev=False,
    )
    try:
        return command.run(parser, words[1:])
    except StartupError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = (f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return HELP.format(commands="\n".join(lines)).rstrip()


def _complain(message: str, exit_code: int = 2) -> int:
    print(f"jaxserve: error: {message}", file=sys.stderr)
    return exit_code


def _serve(parser: Parser, words: Sequence[str]) -> int:
    from jaxserve.cli.options import add_flags, config_from_flags

    parser.usage = "jaxserve serve [MODEL] [OPTIONS]"
    add_flags(parser)
    config = config_from_flags(parser.read(words))

    from jaxserve.cli.serve import run_serve  # after the config: a mistake in a flag need not wait for it

    return run_serve(config)


def _bench(parser: Parser, words: Sequence[str]) -> int:
    from jaxserve.cli.bench import add_arguments, run

    add_arguments(parser)
    return run(parser.read(words))


def _plan(parser: Parser, words: Sequence[str]) -> int:
    from jaxserve.cli.plan import add_arguments, run

    parser.usage = "jaxserve plan [MODEL] [OPTIONS]"
    add_arguments(parser)
    return run(parser.read(words))


def _compile(parser: Parser, words: Sequence[str]) -> int:
    from jaxserve.cli.compile import add_arguments, run

    parser.usage = "jaxserve compile [MODEL] --output DIR [OPTIONS]"
    add_arguments(parser)
    return run(parser.read(words))


def _chat(parser: Parser, words: Sequence[str]) -> int:
    from jaxserve.cli.ask import split_words
    from jaxserve.cli.chat import add_arguments, run

    parser.usage = "jaxserve chat [MODEL] [OPTIONS] [-- SERVE OPTIONS]"
    add_arguments(parser)
    own, serve_words = split_words(words)
    return run(parser.read(own), serve_words)


def _complete(parser: Parser, words: Sequence[str]) -> int:
    from jaxserve.cli.ask import split_words
    from jaxserve.cli.complete import add_arguments, run

    parser.usage = "jaxserve complete [TEXT [MODEL]] [OPTIONS] [-- SERVE OPTIONS]"
    add_arguments(parser)
    own, serve_words = split_words(words)
    return run(parser.read(own), serve_words)


def _health(parser: Parser, words: Sequence[str]) -> int:
    from jaxserve.cli.health import add_arguments, run

    add_arguments(parser)
    return run(parser.read(words))


def _version(parser: Parser, words: Sequence[str]) -> int:
    import platform
    from importlib import metadata

    parser.read(words)
    print(f"jaxserve {__version__} (jax {metadata.version('jax')}, Python {platform.python_version()})")
    return 0


COMMANDS = (
    Command("serve", "serve a model over HTTP", _serve),
    Command("chat", "talk to a model in the terminal", _chat),
    Command("complete", "let a model continue a text", _complete),
    Command("plan", "say what a model needs on a device and how fast it could be", _plan),
    Command("compile", "compile a model's programs ahead, for a cache to be shipped", _compile),
    Command("bench", "measure a running server, the engine alone, or how fast a server starts", _bench),
    Command("health", "exit 0 if a server is alive, for container health checks", _health),
    Command("version", "print the versions of jaxserve, jax and Python", _version),
)

if __name__ == "__main__":
    raise SystemExit(main())
