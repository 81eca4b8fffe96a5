"""Every `jaxserve` command that a page shows, in a block or in a line of text, is one that the program understands."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from jaxserve.cli.main import COMMANDS, Parser
from jaxserve.runtime.environment import load_config, load_settings
from jaxserve.runtime.models.model_configs import configs_of_models, entries_of_flags
from jaxserve.runtime.settings import SETTINGS

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "SECURITY.md", *ROOT.glob("examples/*.md")])
_BLOCK = re.compile(r"^\s*(?:\$ |Exec\w+=)?(?:\S+/)?(jaxserve (?:.*\\\n)*.*)$", re.M)
"""A command in a block of code; lines that end with a backslash go on."""
_FENCED = re.compile(r"^```[a-z]*\n(.*?)^```", re.M | re.S)
_INLINE = re.compile(r"`(jaxserve [a-z][^`\n]*)`")
_USAGE = re.compile(r"\[[^\]]*\]|\s\.\.\.")
"""Words that stand for others: `[OPTIONS]`, `...`."""
_SHELL = re.compile(r"\s(?:[|<>]|&&|2>).*$")
NAMES = frozenset(setting.name for setting in SETTINGS)
SERVERS = ("serve", "upgrade", "config", "doctor")
"""Commands whose options are those of a server."""


def commands_of(text: str) -> set[str]:
    blocks = _FENCED.findall(text)
    shown = {line for block in blocks for line in _BLOCK.findall(block)}
    return {line.replace("\\\n", " ") for line in shown} | set(_INLINE.findall(re.sub(_FENCED, "", text)))


SHOWN = sorted({(page.name, line) for page in PAGES for line in commands_of(page.read_text(encoding="utf-8"))})


def words_of(line: str) -> list[str]:
    alternatives = line.replace("\\|", "|").split("|")[0] if re.search(r"\w\\\|\w", line) else line
    return shlex.split(_SHELL.sub("", _USAGE.sub("", alternatives)), comments=True)[1:]


def write_files(page: str) -> None:
    """Write the config files that a page shows: their first line is their name."""
    text = next(path for path in PAGES if path.name == page).read_text(encoding="utf-8")
    for name, content in re.findall(r"^```yaml\n# ([\w.-]+\.yaml)\n(.*?)^```", text, re.M | re.S):
        Path(name).write_text(content, encoding="utf-8")


def test_commands_of_pages_are_found() -> None:
    assert len(SHOWN) >= 100
    assert {"serve", "upgrade", "status", "replay", "plan"} <= {line.split()[1] for _, line in SHOWN}
    assert words_of("jaxserve completion bash\\|zsh") == ["completion", "bash"]
    assert words_of("jaxserve complete - < prompt.txt > out.txt") == ["complete", "-"]
    assert words_of("jaxserve chat MODEL -- --port 1  # a comment") == ["chat", "MODEL", "--", "--port", "1"]


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[f"{page}:{line}" for page, line in SHOWN])
def test_documented_command_is_understood(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_files(page)
    understand(line)


def understand(line: str) -> None:
    """Fail for a command that the program does not understand."""
    words = words_of(line)
    command = {command.name: command for command in COMMANDS}[words[0]]
    if len(words) == 1:
        return  # the name of a command, which may need more
    parser = Parser(prog=line, allow_abbrev=False)
    importlib.import_module(f"jaxserve.cli.{command.name}").add_arguments(parser)
    cut = words.index("--") if "--" in words else len(words)
    assert cut == len(words) or command.takes_serve_words
    given = vars(parser.read(words[1:cut]))
    if words[0] in SERVERS:
        flags = {name: value for name, value in given.items() if value is not None}
        if models := flags.pop("models", None):
            common = load_settings({n: flags[n] for n in flags.keys() & NAMES}, {}, None)
            configs_of_models(entries_of_flags(models), common.values)
        else:
            load_config(flags={"model": "default"} | {n: flags[n] for n in flags.keys() & NAMES})
