"""Every command of the program that a page shows has a name and flags that exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from jaxserve.cli.main import COMMANDS, Parser
from jaxserve.errors import ConfigError
from tests.documented_commands import PAGES, commands_of

MODULES = {command.name: f"jaxserve.cli.{command.name}" for command in COMMANDS}


def shown(page: Path) -> list[list[str]]:
    """Return the commands with arguments; `jaxserve NAME` alone names a command."""
    return [words[1:] for words in commands_of(page, "jaxserve", "numactl") if len(words) > 2]


def read(words: list[str]) -> None:
    """Parse a command. Raises ConfigError."""
    if "jaxserve" in words:  # numactl starts it
        words = words[words.index("jaxserve") + 1 :]
    name, *arguments = words
    parser = Parser(prog=f"jaxserve {name}", allow_abbrev=False)
    importlib.import_module(MODULES[name]).add_arguments(parser)
    parser.read(arguments[: arguments.index("--")] if "--" in arguments else arguments)


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: page.stem)
def test_commands_of_a_page_have_flags_that_exist(page: Path) -> None:
    for words in shown(page):
        read(words)


def test_commands_are_found_and_a_wrong_flag_would_be_seen() -> None:
    assert sum(len(shown(page)) for page in PAGES) > 100
    with pytest.raises(ConfigError, match="unknown option `--max-seqs`"):
        read(["serve", "MODEL", "--max-seqs", "4"])
    with pytest.raises(KeyError):
        read(["server", "MODEL"])
