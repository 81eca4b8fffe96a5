"""The blocks of code of `docs/clients.md`, for tests that run them."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.e2e.http_server import ROOT

URL = "http://127.0.0.1:8000"
"""Address of the server in every block."""


class Block(NamedTuple):
    """A block of code below a heading of the page."""

    heading: str
    language: str
    text: str


def blocks() -> list[Block]:
    """Return the blocks of the page, in its order."""
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    found = []
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        heading = section.partition("\n")[0]
        found += [
            Block(heading, language, text)
            for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.M | re.S)
        ]
    return found


def blocks_of(heading: str, language: str) -> list[str]:
    """Return the texts of a section's blocks in this language."""
    return [block.text for block in blocks() if (block.heading, block.language) == (heading, language)]
