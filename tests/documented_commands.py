"""Commands that the pages of docs/ show: lines of their blocks, and those between backquotes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
    ROOT / "README.md",
]
SHELLS = ("console", "sh", "bash", "")
"""Languages of blocks with commands."""
_PREFIX = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:\S+/(?=jaxserve ))?")
_PLACEHOLDERS = (
    (r"\[(?:OPTIONS|the options [\w ]+)\]", ""),
    (r"\[(-*[\w -]+)\]", r"\1"),  # optional words
    (r"\\\|\w+", ""),  # alternatives in a table
    (r" [<>] \S+", ""),  # files of the shell
)


def shown_in(page: Path) -> list[str]:
    """Return the texts of a page that may be commands, without variables before them, each on one line."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for kind, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.M | re.S) if kind in SHELLS]
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n *", " ", block).splitlines()]
    quoted = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S))]  # fmt: skip
    units = re.findall(r"^Exec\w+=(.+)$", text, re.M)
    return [_PREFIX.sub("", line) for line in [*lines, *quoted, *units]]


def words_of(command: str) -> list[str]:
    """Return the words of a command without placeholders, comments and what follows a pipe."""
    for pattern, instead in _PLACEHOLDERS:
        command = re.sub(pattern, instead, command)
    words = [word for word in shlex.split(command, comments=True) if word not in ("&", "...")]
    return words[: words.index("|")] if "|" in words else words


def commands_of(page: Path, *programs: str) -> list[list[str]]:
    """Return the words of a page's commands of some programs, which have at least one argument."""
    lines = [line for line in shown_in(page) if line.split(" ")[0] in programs]
    return [words for words in map(words_of, lines) if len(words) > 1]
