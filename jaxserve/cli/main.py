"""The `jaxserve` command: imports the subcommand, runs it, and turns errors into one line and an exit code.

It imports no other subcommand, so that `jaxserve --help` is quick.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import logging
import os
import signal
import sys
from argparse import _SubParsersAction
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jaxserve.errors import ConfigError, StartupError
from jaxserve.foreign_settings import advice_for_flag
from jaxserve.log import report

HELP = """\
usage: jaxserve COMMAND [OPTIONS]

JAX-native LLM inference server with an OpenAI-compatible API.

commands:
{commands}

examples:
  jaxserve serve                                       the default model, if it is installed
  jaxserve serve ./model.gguf --port 8123              a GGUF file
  jaxserve serve Qwen/Qwen3-0.6B --max-model-len 4096  a model of the Hugging Face hub
  jaxserve serve --model a=./a.gguf --model b=./b      several models, an engine each
  jaxserve serve --config configs/laptop-cpu.yaml      settings from a file; flags override it
  jaxserve chat                                        talk to the running server; `jaxserve chat MODEL` starts one
  jaxserve plan Qwen/Qwen3-0.6B --device h200          memory and speed on a device, without loading it
  jaxserve bench serve --workload chat                 load a running server and report latencies

Every setting is a flag (--max-num-seqs), an environment variable (JAXSERVE_MAX_NUM_SEQS) and a file key
(max_num_seqs). `jaxserve COMMAND --help` lists the options of a command.
"""


_LIKENESS = 0.7
"""A flag that is less like any known one, from 0 to 1, is not taken for a misspelt one."""


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ConfigErrors of one line that names the nearest flag."""

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all of `words`. Raises ConfigError."""
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            help_ = f"`{self.prog} --help` lists the options"
            if not unknown[0].startswith("-"):
                raise ConfigError(f"unexpected argument `{unknown[0]}`; {help_}")
            flag = unknown[0].split("=")[0]
            raise ConfigError(f"unknown option `{unknown[0]}`; {self._advice(flag) or help_}")
        return arguments

    def _advice(self, flag: str) -> str | None:
        """Return what to use instead of a flag of other servers, or the flag that was probably meant."""
        flags = self._flags()
        if "--max-model-len" in flags and (advice := advice_for_flag(flag)) is not None:
            return advice
        names = {known.lstrip("-"): known for known in flags}
        near = difflib.get_close_matches(flag.lstrip("-"), names, n=1, cutoff=_LIKENESS)
        return f"did you mean `{names[near[0]]}`?" if near else None

    def _flags(self) -> list[str]:
        children = [action.choices.values() for action in self._actions if isinstance(action, _SubParsersAction)]
        own = [flag for action in self._actions for flag in action.option_strings]
        return own + [flag for parsers in children for parser in parsers for flag in parser._flags()]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. The module of its name in this package has `add_arguments` and `run`."""

    name: str
    summary: str
    usage: str = "[OPTIONS]"
    takes_serve_words: bool = False
    """True if words after `--` are options for a server that the command starts."""

    def __call__(self, words: Sequence[str]) -> int:
        """Parse `words` and run the command; returns the exit code."""
        parser = Parser(
            prog=f"jaxserve {self.name}",
            usage=f"jaxserve {self.name} {self.usage}",
            description=self.summary,
            allow_abbrev=False,
        )
        module = importlib.import_module(f"jaxserve.cli.{self.name}")
        module.add_arguments(parser)
        cut = words.index("--") if self.takes_serve_words and "--" in words else len(words)
        arguments = parser.read(words[:cut])
        code: int = module.run(arguments, words[cut + 1 :]) if self.takes_serve_words else module.run(arguments)
        return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 2 for a user's mistake, 130 for Ctrl-C, 141 if the output is not read."""
    _complete_streams()
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:  # also after --help, which raises SystemExit
            sys.stdout.flush()
    except StartupError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `jaxserve ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the exit
        return 128 + signal.SIGPIPE


def _complete_streams() -> None:
    """Open the standard streams that were closed at the start, and let standard output take any text.

    Names of files may be no UTF-8, and the encoding of a terminal may have few characters.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the first that is free: that of the stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
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
    return commands[words[0]](words[1:])


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = (f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return HELP.format(commands="\n".join(lines)).rstrip()


def _complain(message: str, exit_code: int = 2) -> int:
    report(logging.ERROR, message, plain=f"jaxserve: error: {message}")
    return exit_code


COMMANDS = (
    Command("serve", "serve a model, or several, over HTTP", "[MODEL | --model NAME=MODEL ...] [OPTIONS]"),
    Command("upgrade", "replace the running server on its port without losing a request", "[MODEL] [OPTIONS]"),
    Command("chat", "talk to a model in the terminal", "[MODEL] [OPTIONS] [-- SERVE OPTIONS]", takes_serve_words=True),
    Command(
        "complete", "let a model continue a text", "[TEXT [MODEL]] [OPTIONS] [-- SERVE OPTIONS]", takes_serve_words=True
    ),
    Command(
        "plan",
        "print what a model, or several, need on a device and how fast it could be",
        "[MODEL | --model NAME=MODEL ...] [OPTIONS]",
    ),
    Command(
        "compile", "compile a model's programs ahead of time, into a cache to ship", "[MODEL] --output DIR [OPTIONS]"
    ),
    Command(
        "convert", "write a model's parameters as the server holds them, for a faster start", "MODEL OUT [OPTIONS]"
    ),
    Command("bench", "measure a running server, the engine alone, or how fast a server starts"),
    Command("models", "list the models on this machine, and which of them it can serve", "[FOLDER ...] [OPTIONS]"),
    Command("status", "show what a running server does, in one screen"),
    Command(
        "doctor",
        "check this machine for a server: devices, versions, memory, limits, caches, port",
        "[MODEL | --model NAME=MODEL ...] [OPTIONS]",
    ),
    Command("replay", "run the scheduler again over a flight record, and find the first step that differs", "FILE"),
    Command("check", "check a config file: each mistake with its line and a suggestion", "FILE"),
    Command("config", "print the settings that would be in force", "[MODEL | --model NAME=MODEL ...] [OPTIONS]"),
    Command("health", "exit 0 if a server serves requests, or with --live if it runs; for container health checks"),
    Command("completion", "print a script with which a shell completes commands and flags", "bash|zsh|tcsh"),
    Command("version", "print the versions of jaxserve, jax and Python"),
)

if __name__ == "__main__":
    raise SystemExit(main())
