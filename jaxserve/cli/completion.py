"""`jaxserve completion`: a script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse
import importlib
from typing import Final

SHELLS: Final = ("bash", "zsh", "tcsh")
EXAMPLES: Final = """\
install:
  bash  jaxserve completion bash > ~/.local/share/bash-completion/completions/jaxserve
  zsh   jaxserve completion zsh > "${fpath[1]}/_jaxserve"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=SHELLS, help="shell to complete in")


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns 0."""
    import shtab

    from jaxserve.cli.main import COMMANDS  # that module imports this one

    parser = argparse.ArgumentParser(prog="jaxserve")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        inner = commands.add_parser(command.name, help=command.summary)
        importlib.import_module(f"jaxserve.cli.{command.name}").add_arguments(inner)
    print(shtab.complete(parser, shell=arguments.shell))
    return 0
