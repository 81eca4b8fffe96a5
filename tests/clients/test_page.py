"""The snippets of `docs/clients.md`, each run against the default model: they print what their comments say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.clients.lane import API_KEY, require_lane
from tests.clients.node_scripts import output_of, requires
from tests.clients.page import URL, Block, blocks
from tests.clients.questions import MODEL
from tests.e2e.http_server import Server

require_lane()


def params(language: str) -> list[Any]:
    """Return the page's blocks in this language as parameters; those for node need their packages."""
    return [
        pytest.param(
            block,
            id=block.heading,
            marks=[
                mark for name in re.findall(r'^import .* from "([^"/]+)"', block.text, re.M) for mark in requires(name)
            ],
        )
        for block in blocks()
        if block.language == language
    ]


def adapted(block: Block, server: Server) -> str:
    """Return a block with the test's server and key."""
    assert URL in block.text
    assert '"secret"' in block.text
    return block.text.replace(URL, server.url).replace('"secret"', f'"{API_KEY}"')


def printed(block: Block, comment: str) -> list[str]:
    """Return the lines that a block prints, by the comments after its last calls of a line."""
    lines = re.findall(rf"^(?:print|console\.log)\(.*\);?  ?{comment} (.*)$", block.text, re.M)
    assert lines, f"no line of {block.heading} says what it prints"
    return lines


@pytest.mark.parametrize("block", params("python"))
def test_a_snippet_in_python_prints_what_it_says(
    smollm2: Server, block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(adapted(block, smollm2), block.heading, "exec", dont_inherit=True), {"__name__": "__main__"})
    assert capsys.readouterr().out.splitlines() == printed(block, "#")


@pytest.mark.parametrize("block", params("js"))
def test_a_snippet_for_node_prints_what_it_says(smollm2: Server, block: Block) -> None:
    output = output_of(["--input-type=module"], smollm2, MODEL, adapted(block, smollm2))
    assert output.splitlines() == printed(block, "//")
