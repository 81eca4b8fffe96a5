"""Commands that the help, the README and the other pages show are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jaxserve.cli import compile as compile_ahead
from jaxserve.cli import plan
from jaxserve.cli.bench import add_arguments
from jaxserve.cli.flags import add_flags, add_model_flag
from jaxserve.cli.main import COMMANDS, HELP, Parser
from jaxserve.runtime.environment import load_config, load_settings
from jaxserve.runtime.models.model_configs import configs_of_models, entries_of_flags

ROOT = Path(__file__).parents[3]
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "Makefile",
        "docs/planning.md",
        "docs/startup.md",
        "docs/embeddings.md",
    )
}
PAGES["help"] = HELP
SHOWN = sorted(
    {
        line.strip()
        for text in PAGES.values()
        for line in re.findall(r"^\s*(jaxserve (?:serve|bench|compile|plan)\b.*)$", text, re.M)
    }
)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_there_are_commands_to_check() -> None:
    assert len(SHOWN) >= 7


@pytest.mark.parametrize("line", SHOWN)
def test_shown_command_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line.split("  ")[0])
    assert words[1] in {command.name for command in COMMANDS}
    parser = Parser(prog=line)
    if words[1] == "bench":
        add_arguments(parser)
        parser.read(words[2:])
        return
    if words[1] == "plan":
        plan.add_arguments(parser)
        parser.read(words[2:])
        return
    if words[1] == "compile":
        compile_ahead.add_arguments(parser)
        assert parser.read(words[2:]).output
        return
    add_model_flag(parser)
    add_flags(parser)
    flags = {name: value for name, value in vars(parser.read(words[2:])).items() if value is not None}
    if models := flags.pop("models", None):
        configs_of_models(entries_of_flags(models), load_settings(flags, {}, None).values)
        return
    file = flags.pop("config", None)
    load_config(flags={"model": "default"} | flags, file=Path(file) if file else None)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_shown_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", PAGES[page])) <= targets


def test_examples_of_the_help_are_found_by_the_check() -> None:
    assert any("laptop-cpu" in line for line in SHOWN)
